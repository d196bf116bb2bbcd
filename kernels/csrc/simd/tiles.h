// The tile registers of AMX and the products of tiles; QUIRE_AMX says that there are any.
//
// Eight tiles of up to 16 rows of 64 bytes. Here 0 to 3 hold sums, 4 and 5 activations, 6 and 7 weights, and a product
// adds to sums [rows][16] those of activations [rows][16 steps] by weights [16 steps][16 lanes], a step being four
// bytes: two bf16 or four integers. That is a packed panel as it lies: the weights of the 16 lanes from v * 16 on are
// tile_load<6>(panel + step * 256 + v * 64, 256).
//
// Owns the configuration of each thread. Promises: a row's sums do not depend on the other rows, nor on their number.
// Must not know: matrices, attention.
#pragma once

#include <cstdint>

namespace quire {

constexpr int kTiles = 8;
constexpr int kTileHeight = 16;  // rows of sums and of activations
constexpr int kTileWidth = 16;   // lanes: sums of 32 bits
constexpr int kTileDepth = 16;   // steps of four bytes: rows of weights
constexpr int kTileBytes = 64;   // of a row

}  // namespace quire

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QUIRE_AMX 1

#include <immintrin.h>

namespace quire {

// What LDTILECFG reads.
struct TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "the format of the instruction");

// How this thread's tiles are configured; no rows: not at all.
struct TileShapes {
  int first, second, depth;
};
inline thread_local TileShapes tile_shapes{0, 0, 0};

// The sums and activations of the tiles 0, 1 and 4 get `first` rows, those of 2, 3 and 5 `second` rows, 1 to 16 each or
// none where they are not used; weights have `depth` steps, and so many have the activations. Leaves all tiles zero,
// but does nothing at all where the thread has that configuration.
inline void configure_tiles(int first, int second, int depth = kTileDepth) {
  if (second == 0) second = 1;  // an unused tile costs nothing, one without rows must not have columns either
  TileShapes& now = tile_shapes;
  if (now.first == first && now.second == second && now.depth == depth) return;
  now = {first, second, depth};
  TileConfig config;
  for (int tile = 0; tile < kTiles; ++tile) {
    const bool weights = tile >= 6, activations = tile == 4 || tile == 5;
    const bool of_first = tile < 2 || tile == 4;
    config.rows[tile] = static_cast<uint8_t>(weights ? depth : of_first ? first : second);
    config.row_bytes[tile] = static_cast<uint16_t>(activations ? depth * 4 : kTileBytes);
  }
  // Not the intrinsics, here and below: that of gcc 12 lets the compiler leave out all but 8 bytes of what is read, and
  // those that load let it write the memory afterwards; and they take no number of a tile that a template knows.
  asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
}

// A thread that keeps its tiles costs the system 8 KiB at every switch: not to be forgotten before it sleeps.
inline void release_tiles() {
  if (tile_shapes.first == 0) return;
  tile_shapes = {0, 0, 0};
  asm volatile("tilerelease" : : : "memory");
}

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// The tile's rows, `stride` bytes apart. Strides that are powers of two meet in few sets of the cache.
template <int kTile>
inline void tile_load(const void* at, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(at), "r"(stride) : "memory");
}

template <int kTile>
inline void tile_store(void* at, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(at), "r"(stride) : "memory");
}

// sums += activations * weights. Of bf16: in a chain from zero that of the steps' first values, in another that of the
// second ones, each product fused with its addition; then the two are added, then that to the sum; denormals are zeros.
template <int kSum, int kA, int kB>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

// Of integers, modulo 2^32: activations unsigned and weights signed, the reverse, both signed.
template <int kSum, int kA, int kB>
inline void tile_dot_u8s8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
template <int kSum, int kA, int kB>
inline void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}
template <int kSum, int kA, int kB>
inline void tile_dot_s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSum), "i"(kA), "i"(kB));
}

// Tiles for as long as it lives, in the thread that made it.
class TilesInUse {
 public:
  TilesInUse() = default;
  ~TilesInUse() { release_tiles(); }
  TilesInUse(const TilesInUse&) = delete;
  TilesInUse& operator=(const TilesInUse&) = delete;
};

// While it lives, the thread's floats do as those of tiles: denormal operands and results are zeros.
class DenormalsAreZeros {
 public:
  DenormalsAreZeros() : before_(_mm_getcsr()) {
    constexpr unsigned kFlushResults = 0x8000, kZeroOperands = 0x0040;
    set(before_ | kFlushResults | kZeroOperands);
  }
  ~DenormalsAreZeros() { set(before_); }
  DenormalsAreZeros(const DenormalsAreZeros&) = delete;
  DenormalsAreZeros& operator=(const DenormalsAreZeros&) = delete;

 private:
  // What is loaded later is not computed with sooner: compilers do not know that arithmetic reads this register.
  static void set(unsigned control) {
    asm volatile("" : : : "memory");
    _mm_setcsr(control);
    asm volatile("" : : : "memory");
  }
  unsigned before_;
};

}  // namespace quire

#endif
