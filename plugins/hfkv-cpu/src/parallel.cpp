// torch's own worker threads, where they can be had. After each of its operations they spin for a while; threads of ours
// would wait behind them for a core. So the OpenMP runtime that torch has loaded is asked for them by name: it is no
// dependency of this module, and a process without it (macOS, for one) starts threads as it needs them.
#include "parallel.h"

#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

namespace hfkv {
namespace {

struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{0};
    int64_t count;
    Work work;
    void* context;
};

void take_turns(void* data) {
    Shared& shared = *static_cast<Shared*>(data);
    const int worker = shared.workers.fetch_add(1, std::memory_order_relaxed);
    for (int64_t i; (i = shared.next.fetch_add(1, std::memory_order_relaxed)) < shared.count;) {
        shared.work(shared.context, i, worker);
    }
}

typedef void (*Parallel)(void (*)(void*), void*, unsigned threads, unsigned flags);

// looked up at the first use, by when torch is there: what this module works on are its tensors
Parallel openmp() {
    static const Parallel found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return found;
}

struct Memory {
    float* data = nullptr;
    int64_t size = 0;
    ~Memory() { std::free(data); }
};

}  // namespace

const char* threads_from() { return openmp() ? "openmp" : "std::thread"; }

void parallel(int64_t count, int threads, Work work, void* context) {
    Shared shared;
    shared.count = count;
    shared.work = work;
    shared.context = context;
    if (threads > count) threads = static_cast<int>(count);
    if (threads <= 1) return take_turns(&shared);
    if (openmp()) return openmp()(take_turns, &shared, threads, 0);
    std::vector<std::thread> others;
    try {
        for (int i = 1; i < threads; i++) others.emplace_back(take_turns, &shared);
    } catch (const std::system_error&) {
        // the system gives no more threads: those that there are do the work
    }
    take_turns(&shared);
    for (std::thread& thread : others) thread.join();
}

float* scratch(int64_t floats) {
    static thread_local Memory own;
    if (own.size < floats) {
        std::free(own.data);
        own.size = 0;
        own.data = static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64));
        if (!own.data) throw std::bad_alloc();
        own.size = floats;
    }
    return own.data;
}

}  // namespace hfkv
