// One instruction set's kernels: this file is compiled once for each (CMakeLists.txt), with HFKV_ISA its name.
#include <cmath>

#include "attend.h"
#include "matmul.h"
#include "pack.h"

#define QUOTE(x) #x
#define NAME_OF(x) QUOTE(x)
#define JOIN(a, b) a##b
#define TABLE_OF(x) JOIN(kernels_, x)

namespace hfkv {
extern const Kernels TABLE_OF(HFKV_ISA);
const Kernels TABLE_OF(HFKV_ISA) = {
    NAME_OF(HFKV_ISA), HFKV_ISA::unit_rows, HFKV_ISA::attend_scratch, HFKV_ISA::partial_size, HFKV_ISA::attend,
    HFKV_ISA::merge, HFKV_ISA::convert_scratch, HFKV_ISA::pack, HFKV_ISA::unpack,
    HFKV_ISA::matmul_shared, HFKV_ISA::matmul_scratch, HFKV_ISA::matmul_prepare, HFKV_ISA::matmul, HFKV_ISA::expand,
};
}  // namespace hfkv
