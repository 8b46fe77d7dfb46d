// The same products on AMX tiles: the digits are a tile as they are written, 64 bytes of each row and digit; the codes are
// spread into a tile whose rows hold four bytes of each of 16 elements.
#pragma once

#include "integer.h"

#if !defined(__AMX_INT8__)

namespace hfkv {
namespace HFKV_ISA {
INLINE void stay_awake() {}
}  // namespace HFKV_ISA
}  // namespace hfkv

#else

namespace hfkv {
namespace HFKV_ISA {

// rows of a tile, of 64 bytes each
constexpr int64_t TILE_ROWS = 16, TILE = TILE_ROWS * CHUNK;

// How rows of digits are shared out among tiles.
struct TileRows {
    int64_t tiles, rows;

    explicit TileRows(int64_t all) : tiles((all + TILE_ROWS - 1) / TILE_ROWS), rows((all + tiles - 1) / tiles) {}
    int64_t total() const { return tiles * rows; }
};

// The thread's tiles as these products need them, while it lives: 0 to 3 are sums, 4 and 5 digits, 6 and 7 codes.
class TileConfig {
    struct alignas(64) Config {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    };
    Config before;

  public:
    explicit TileConfig(const TileRows& rows) {
        Config own;
        for (int i = 0; i < 8; i++) own.bytes[i] = CHUNK, own.rows[i] = i < 6 ? rows.rows : TILE_ROWS;
        asm volatile("sttilecfg %0" : "=m"(before));
        asm volatile("ldtilecfg %0" : : "m"(own));
    }
    ~TileConfig() {
        if (before.palette) {
            asm volatile("ldtilecfg %0" : : "m"(before));
        } else {
            asm volatile("tilerelease");
        }
    }
    TileConfig(const TileConfig&) = delete;
};

// spelt as assembly since GCC 12's intrinsics do not say that they read and write memory
#define LOAD_TILE(tile, from, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile : : "r"(from), "r"((int64_t)(stride)) : "memory")
#define STORE_TILE(tile, to, stride) \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(stride)) : "memory")
#define CLEAR_TILE(tile) asm volatile("tilezero %%tmm" #tile : :)
#define ADD_TILES(sums, digits, codes) asm volatile("tdpbsud %%tmm" #codes ", %%tmm" #digits ", %%tmm" #sums : :)
#define ADD_PAIRS(sums, rows, columns) asm volatile("tdpbf16ps %%tmm" #columns ", %%tmm" #rows ", %%tmm" #sums : :)

// The codes of an operand as tiles: of each chunk one for the first and one for the second half of the elements.
template <int BITS> static void spread_tiles(const Operand& operand, uint8_t* tiles) {
    alignas(64) static constexpr Spread<BITS> spread;
    constexpr int64_t FOUR = four_bytes(BITS);
    const int64_t ahead = operand.ahead, fours = operand.fours, plane = operand.plane;
    int64_t q = 0;
    auto write = [&](const uint8_t* p, uint8_t* to) {
        __builtin_prefetch(p + ahead, 0, 2);
        if (BITS == HALVES) __builtin_prefetch(p + plane + ahead, 0, 2);
        __m512i elements, further;
        Spread<BITS>::groups(spread, p, plane, elements, further);
        _mm512_store_si512(to, elements);
        _mm512_store_si512(to + TILE, further);
    };
    for (int64_t b = 0; b < operand.blocks; b++) {
        const uint8_t* p = operand.codes + b * operand.block_stride;
        int64_t i = 0;
        // q is a multiple of four: those after it are four rows apart
        for (; i + 4 <= fours; i += 4, q += 4, p += 4 * FOUR) {
            uint8_t* to = tiles + q / 16 * 2 * TILE + q % 16 / 4 * CHUNK;
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) write(p + j * FOUR, to + 4 * j * CHUNK);
        }
        for (; i < fours; i++, q++, p += FOUR) write(p, tiles + q / 16 * 2 * TILE + place_of(q % 16) * CHUNK);
    }
}

typedef void (*SpreadTiles)(const Operand&, uint8_t*);
static SpreadTiles spread_for(const Format& f) {
    switch (layout(f)) {
        case 2: return spread_tiles<2>;
        case 3: return spread_tiles<3>;
        case 4: return spread_tiles<4>;
        case HALVES: return spread_tiles<HALVES>;
        case UPPER: return spread_tiles<UPPER>;
        default: return spread_tiles<8>;
    }
}

// Tiles of digits, one or two, times those of the codes, over so many chunks: the sums stay in tiles.
template <bool TWO>
INLINE void multiply_tiles(const uint8_t* codes, const int8_t* digits, int64_t chunks, const TileRows& shared) {
    const int64_t chunk_bytes = shared.total() * CHUNK, tile_bytes = shared.rows * CHUNK;
    CLEAR_TILE(0);
    CLEAR_TILE(1);
    if (TWO) {
        CLEAR_TILE(2);
        CLEAR_TILE(3);
    }
    for (int64_t c = 0; c < chunks; c++, digits += chunk_bytes, codes += 2 * TILE) {
        LOAD_TILE(4, digits, CHUNK);
        LOAD_TILE(6, codes, CHUNK);
        ADD_TILES(0, 4, 6);
        LOAD_TILE(7, codes + TILE, CHUNK);
        ADD_TILES(1, 4, 7);
        if (!TWO) continue;
        LOAD_TILE(5, digits + tile_bytes, CHUNK);
        ADD_TILES(2, 5, 6);
        ADD_TILES(3, 5, 7);
    }
}

// The sums that are in tiles, to rows of a group's.
template <bool TWO> INLINE void store_tiles(const TileRows& shared, int32_t* sums) {
    constexpr int64_t STRIDE = GROUP * sizeof(int32_t);
    STORE_TILE(0, sums, STRIDE);
    STORE_TILE(1, sums + 16, STRIDE);
    if (!TWO) return;
    sums += shared.rows * GROUP;
    STORE_TILE(2, sums, STRIDE);
    STORE_TILE(3, sums + 16, STRIDE);
}

// The unit that multiplies tiles sleeps after some 300 ns without work, and takes longer than that to wake: a product of
// whatever is there keeps it awake.
INLINE void stay_awake() { ADD_TILES(0, 4, 6); }

}  // namespace HFKV_ISA
}  // namespace hfkv

#endif
