// Work on several threads.
#pragma once

#include <cstdint>

namespace hfkv {

// Calls `work(context, index, worker)` for 0 <= index < count on at most `threads` threads, the caller's among them;
// `worker`, below `threads`, is the same number for all calls that one thread makes.
typedef void (*Work)(void* context, int64_t index, int worker);
void parallel(int64_t count, int threads, Work work, void* context);

// Memory of the calling thread, 64-byte aligned: what it held before is lost. Throws std::bad_alloc.
float* scratch(int64_t floats);

// "openmp" where torch's own threads are used, else "std::thread".
const char* threads_from();

}  // namespace hfkv
