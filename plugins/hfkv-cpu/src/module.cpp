// The Python module: pointers and strides come in, a plan is made, and the kernels of one instruction set run it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#if defined(HFKV_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "args.h"
#include "parallel.h"

namespace nb = nanobind;

namespace hfkv {

extern const Kernels kernels_portable;
#if defined(HFKV_X86)
extern const Kernels kernels_avx2, kernels_avx512, kernels_avx512_vnni;
#endif
#if defined(HFKV_AMX)
extern const Kernels kernels_avx512_amx;
#endif

namespace {

#if defined(HFKV_AMX)
// whether the processor has tiles, of bytes and of bfloat16, and Linux gives them to this process (XFEATURE_XTILEDATA)
bool has_tiles() {
    unsigned a, b, c, d;
    // bfloat16, tiles, int8
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 22 & 1) || !(d >> 24 & 1) || !(d >> 25 & 1)) return false;
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
#endif

// best first
std::vector<const Kernels*> usable_kernels() {
    std::vector<const Kernels*> usable;
#if defined(HFKV_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi");
#if defined(HFKV_AMX)
    if (vnni && has_tiles()) usable.push_back(&kernels_avx512_amx);
#endif
    if (vnni) usable.push_back(&kernels_avx512_vnni);
    if (avx512) usable.push_back(&kernels_avx512);
    if (avx2) usable.push_back(&kernels_avx2);
#endif
    usable.push_back(&kernels_portable);
    return usable;
}

const std::vector<const Kernels*> usable = usable_kernels();

const Kernels& kernels_of(int isa) { return *usable.at(isa); }

// A format and its levels, which the kernels point to.
struct OwnedFormat {
    Format format;
    std::array<float, 256> levels;

    OwnedFormat(int nbits, bool channel_axis, int64_t block_length, int64_t head_dim, int64_t runs, int64_t group,
                int64_t group_bytes, int64_t groups, const std::vector<float>& codebook, int64_t plane, bool upper)
        : format{nbits, channel_axis, block_length, head_dim, runs, group, group_bytes, groups, nullptr,
                 !codebook.empty() && !upper, plane, upper} {
        for (int i = 0; i < 256; i++) {
            const int code = i % (1 << nbits);
            levels[i] = codebook.empty() ? static_cast<float>(code) : codebook.at(code);
        }
    }
};

// How a weight is stored, and the levels that its codes stand for.
struct OwnedGrid {
    Code code;
    float middle;
    std::array<float, 16> levels;

    OwnedGrid(int code, float middle, const std::vector<float>& levels_) : code(static_cast<Code>(code)), middle(middle) {
        for (size_t i = 0; i < levels.size(); i++) levels[i] = levels_.empty() ? 0 : levels_[i % levels_.size()];
    }
};

// (pointer, type, stride of the batch, of the heads, of the rows)
Tensor tensor_from(const nb::tuple& t) {
    Tensor r;
    r.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(t[0]));
    r.type = static_cast<Type>(nb::cast<int>(t[1]));
    r.batch_stride = nb::cast<int64_t>(t[2]);
    r.head_stride = nb::cast<int64_t>(t[3]);
    r.row_stride = nb::cast<int64_t>(t[4]);
    return r;
}

// The record of packed blocks, made once for all calls that read them.
void init_blocks(Blocks* blocks, const OwnedFormat& own, nb::object, int64_t count, uintptr_t codes, uintptr_t scale,
                 uintptr_t offset, const nb::tuple& codes_strides, const nb::tuple& scale_strides) {
    Blocks& r = *new (blocks) Blocks{};
    r.format = own.format;
    r.format.levels = own.levels.data();
    r.count = count;
    r.codes = reinterpret_cast<uint8_t*>(codes);
    r.scale = reinterpret_cast<uint16_t*>(scale);
    r.offset = reinterpret_cast<uint16_t*>(offset);
    int64_t* strides[] = {&r.codes_batch, &r.codes_head, &r.codes_block, &r.scale_batch, &r.scale_head, &r.scale_block};
    for (int i = 0; i < 6; i++) *strides[i] = nb::cast<int64_t>(i < 3 ? codes_strides[i] : scale_strides[i - 3]);
}

// Where exact tokens are: made once for all calls that read the same buffers.
struct Exact {
    Tensor keys, values;
};

void init_exact(Exact* exact, const nb::tuple& keys, const nb::tuple& values) {
    new (exact) Exact{tensor_from(keys), tensor_from(values)};
}

// tokens of the smallest part that a context is split into, and the parts that each thread should find to do: a part begins
// with what no cache holds yet
constexpr int64_t PART_TOKENS = 256, PARTS_PER_THREAD = 3;
// numbers in a cache so small that waking a thread takes longer
constexpr int64_t SMALL = 1 << 16;

void make_plan(const Kernels& kernels, Attend& a, int& threads) {
    const int64_t rows = a.heads / a.kv_heads * a.queries, most = kernels.unit_rows(a);
    a.row_blocks = (rows + most - 1) / most;
    a.unit_rows = (rows + a.row_blocks - 1) / a.row_blocks;
    const int64_t work = a.batch * a.kv_heads * a.row_blocks;
    const int64_t tokens = a.keys.count * a.keys.format.block_length + a.exact_length;
    if (work * tokens * a.keys.format.head_dim < SMALL) threads = 1;
    a.splits = 1;
    if (threads > 1) {
        const int64_t wanted = (PARTS_PER_THREAD * threads + work - 1) / work;
        a.splits = std::max<int64_t>(1, std::min(wanted, tokens / PART_TOKENS));
    }
}

template <typename Args> struct Call {
    const Kernels& kernels;
    const Args& args;
    float* memory;
    int64_t size;
};

// `query_sizes` is (batch, heads, queries, head_dim); the output is [batch, queries, heads, channels] and contiguous, in the
// query's type.
void run_attend(int isa, int threads, uintptr_t query, int type, const nb::tuple& query_sizes, const nb::tuple& query_strides,
                const Exact& exact, int64_t exact_length, int64_t sink, const Blocks& keys, const Blocks& values,
                int64_t kv_heads, nb::object mask, uintptr_t output, uintptr_t lse, double scale, bool causal) {
    const Kernels& kernels = kernels_of(isa);
    Attend a{};
    const auto size_of = [&](int i) { return nb::cast<int64_t>(query_sizes[i]); };
    const auto stride_of = [&](int i) { return nb::cast<int64_t>(query_strides[i]); };
    a.batch = size_of(0), a.heads = size_of(1), a.queries = size_of(2), a.kv_heads = kv_heads;
    a.query = {reinterpret_cast<void*>(query), stride_of(0), stride_of(1), stride_of(2), static_cast<Type>(type)};
    a.exact_keys = exact.keys;
    a.exact_values = exact.values;
    a.exact_length = exact_length;
    a.sink = sink;
    a.keys = keys;
    a.values = values;
    const int64_t channels = values.format.head_dim;
    a.output = {reinterpret_cast<void*>(output), a.queries * a.heads * channels, channels, a.heads * channels, a.query.type};
    if (!mask.is_none()) a.mask = tensor_from(nb::cast<nb::tuple>(mask));
    a.lse = reinterpret_cast<float*>(lse);
    a.scale = static_cast<float>(scale);
    a.causal = causal;

    nb::gil_scoped_release release;
    make_plan(kernels, a, threads);
    a.partial_size = kernels.partial_size(a);
    const int64_t blocks_of_rows = a.batch * a.kv_heads * a.row_blocks, units = blocks_of_rows * a.splits;
    const int64_t partial = a.splits > 1 ? (units * a.partial_size + 15) / 16 * 16 : 0;
    const int64_t size = kernels.attend_scratch(a);
    a.partial = scratch(partial + size * threads);
    Call<Attend> call{kernels, a, a.partial + partial, size};
    const auto work = [](void* context, int64_t index, int worker) {
        const auto& c = *static_cast<const Call<Attend>*>(context);
        // the last parts hold the exact tokens and take longest: they come first
        const int64_t count = c.args.batch * c.args.kv_heads * c.args.row_blocks;
        c.kernels.attend(c.args, index % count, c.args.splits - 1 - index / count, c.memory + c.size * worker);
    };
    parallel(units, threads, work, &call);
    if (a.splits == 1) return;
    const auto join = [](void* context, int64_t index, int) {
        const auto& c = *static_cast<const Call<Attend>*>(context);
        c.kernels.merge(c.args, index);
    };
    parallel(blocks_of_rows, blocks_of_rows * a.unit_rows * a.splits < 1024 ? 1 : threads, join, &call);
}

template <bool PACK>
void run_convert(int isa, int threads, const nb::tuple& states, const Blocks& blocks, int64_t batch, int64_t heads) {
    const Kernels& kernels = kernels_of(isa);
    Convert args{batch, heads, tensor_from(states), blocks};
    nb::gil_scoped_release release;
    const int64_t count = batch * heads * args.blocks.count;
    if (count * args.blocks.format.block_length * args.blocks.format.head_dim < SMALL) threads = 1;
    const int64_t size = kernels.convert_scratch(args);
    Call<Convert> call{kernels, args, scratch(size * threads), size};
    const auto work = [](void* context, int64_t index, int worker) {
        const auto& c = *static_cast<const Call<Convert>*>(context);
        (PACK ? c.kernels.pack : c.kernels.unpack)(c.args, index, c.memory + c.size * worker);
    };
    parallel(count, threads, work, &call);
}

// weights of a unit: some microseconds of work
constexpr int64_t UNIT_WEIGHTS = 1 << 15;

// `x` null: the weight itself is written to y. The tensors are given as pointers; x and y have rows of `x_stride` and of
// `y_stride` numbers.
void run_matmul(int isa, int threads, const OwnedGrid& grid, uintptr_t codes, uintptr_t scale, uintptr_t offset, bool one_scale,
                int64_t group, int64_t row_bytes, int64_t rows, int64_t inputs, int64_t outputs, uintptr_t x, int64_t x_stride,
                uintptr_t y, int64_t y_stride, int type) {
    const Kernels& kernels = kernels_of(isa);
    nb::gil_scoped_release release;
    Matmul m{};
    m.rows = x ? rows : 0, m.inputs = inputs, m.outputs = outputs;
    m.code = grid.code, m.middle = grid.middle, m.levels = grid.levels.data();
    m.group = std::min(group, inputs), m.groups = (inputs + m.group - 1) / m.group, m.one_scale = one_scale;
    m.row_bytes = row_bytes;
    m.codes = reinterpret_cast<const uint8_t*>(codes);
    m.scale = reinterpret_cast<const uint16_t*>(scale);
    m.offset = reinterpret_cast<const uint16_t*>(offset);
    m.x = {reinterpret_cast<void*>(x), 0, 0, x_stride, static_cast<Type>(type)};
    m.y = {reinterpret_cast<void*>(y), 0, 0, y_stride, static_cast<Type>(type)};
    if (inputs * outputs < SMALL) threads = 1;
    m.unit_outputs = std::max<int64_t>(4, UNIT_WEIGHTS / inputs / 4 * 4);
    const int64_t shared = (kernels.matmul_shared(m) + 15) / 16 * 16, size = kernels.matmul_scratch(m);
    m.shared = scratch(shared + size * threads);
    kernels.matmul_prepare(m);
    Call<Matmul> call{kernels, m, m.shared + shared, size};
    const auto work = [](void* context, int64_t index, int worker) {
        const auto& c = *static_cast<const Call<Matmul>*>(context);
        (c.args.x.data ? c.kernels.matmul : c.kernels.expand)(c.args, index, c.memory + c.size * worker);
    };
    parallel((outputs + m.unit_outputs - 1) / m.unit_outputs, threads, work, &call);
}

std::vector<std::string> isa_names() {
    std::vector<std::string> names;
    for (const Kernels* kernels : usable) names.push_back(kernels->name);
    return names;
}

}  // namespace
}  // namespace hfkv

NB_MODULE(_kernels, m) {
    using namespace nb::literals;
    // formats are kept for as long as the process runs, and blocks for as long as a cache that may outlive the module
    nb::set_leak_warnings(false);
    m.doc() = "The compiled kernels of hfkv-cpu; hfkv_cpu.kernels calls them.";
    nb::class_<hfkv::OwnedFormat>(m, "Format")
        .def(nb::init<int, bool, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, const std::vector<float>&,
                      int64_t, bool>());
    // what the record points to lives as long as it: the format's levels, and the owner of the memory, if it is given one
    nb::class_<hfkv::Blocks>(m, "Blocks")
        .def("__init__", &hfkv::init_blocks, "format"_a, "owner"_a.none(), "count"_a, "codes"_a, "scale"_a, "offset"_a,
             "codes_strides"_a, "scale_strides"_a, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>());
    nb::class_<hfkv::Exact>(m, "Exact").def("__init__", &hfkv::init_exact, "keys"_a, "values"_a);
    nb::class_<hfkv::OwnedGrid>(m, "Grid").def(nb::init<int, float, const std::vector<float>&>());
    m.def("isa_names", &hfkv::isa_names, "The instruction sets that this processor has, best first.");
    m.def("threads_from", &hfkv::threads_from, "Whose threads do the work: \"openmp\" (torch's own) or \"std::thread\".");
    m.def("attend", &hfkv::run_attend, "isa"_a, "threads"_a, "query"_a, "type"_a, "query_sizes"_a, "query_strides"_a, "exact"_a,
          "exact_length"_a, "sink"_a, "keys"_a, "values"_a, "kv_heads"_a, "mask"_a.none(), "output"_a, "lse"_a, "scale"_a,
          "causal"_a);
    m.def("pack", &hfkv::run_convert<true>, "isa"_a, "threads"_a, "states"_a, "blocks"_a, "batch"_a, "heads"_a);
    m.def("matmul", &hfkv::run_matmul, "isa"_a, "threads"_a, "grid"_a, "codes"_a, "scale"_a, "offset"_a, "one_scale"_a, "group"_a,
          "row_bytes"_a, "rows"_a, "inputs"_a, "outputs"_a, "x"_a, "x_stride"_a, "y"_a, "y_stride"_a, "type"_a);
    m.def("unpack", &hfkv::run_convert<false>, "isa"_a, "threads"_a, "states"_a, "blocks"_a, "batch"_a, "heads"_a);
}
