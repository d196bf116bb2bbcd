// The tile registers of AMX and the instructions that simd/tiles.h spells out, in plain C++: `emulated::NAME(OPERANDS)`
// in their place, in the order in which they are given there. Included first.
//
// Promises: the documented state of every thread, and of bf16 products the order of additions that was found on
// Sapphire Rapids: in a chain from zero the products of the pairs' first values, in another those of the second ones,
// all fused; then the two chains' sum; then that and the tile's; denormals are zeros. What raises a fault ends the
// program. Must not know: the kernels.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

// After <immintrin.h>, which would otherwise call for the instructions.
#if defined(EMULATE_amx_tile)
#define __AMX_TILE__ 1
#endif
#if defined(EMULATE_amx_bf16)
#define __AMX_BF16__ 1
#endif
#if defined(EMULATE_amx_int8)
#define __AMX_INT8__ 1
#endif

namespace emulated {

constexpr int kMaxTiles = 8, kMaxRows = 16, kMaxBytes = 64, kMaxSums = kMaxBytes / 4;

// As LDTILECFG reads it.
struct Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

struct Registers {
  Shapes shapes;
  alignas(64) unsigned char data[kMaxTiles][kMaxRows][kMaxBytes];
};
inline thread_local Registers registers{};

inline void fault_unless(bool allowed) {
  if (!allowed) __builtin_trap();
}

template <typename Config>
void ldtilecfg(const Config& config) {
  static_assert(sizeof(Config) == sizeof(Shapes));
  Shapes shapes;
  std::memcpy(&shapes, &config, sizeof(shapes));
  fault_unless(shapes.palette == 1 && shapes.start_row == 0);
  for (const uint8_t byte : shapes.reserved) fault_unless(byte == 0);
  for (int tile = 0; tile < 16; ++tile) {
    const int rows = shapes.rows[tile], bytes = shapes.bytes[tile];
    fault_unless(tile < kMaxTiles ? rows <= kMaxRows && bytes <= kMaxBytes : rows == 0 && bytes == 0);
    fault_unless((rows == 0) == (bytes == 0));
  }
  registers.shapes = shapes;
  std::memset(registers.data, 0, sizeof(registers.data));
}

inline void tilerelease() { registers = {}; }

inline int rows_of(int tile) {
  fault_unless(registers.shapes.palette == 1 && registers.shapes.rows[tile] > 0);
  return registers.shapes.rows[tile];
}
inline int bytes_of(int tile) { return registers.shapes.bytes[tile]; }

inline void tilezero(int tile) {
  fault_unless(rows_of(tile) > 0);
  std::memset(registers.data[tile], 0, sizeof(registers.data[tile]));
}

// What lies past a tile's rows and bytes becomes zero.
inline void tileloadd(int tile, const void* from, int64_t stride) {
  tilezero(tile);
  for (int row = 0; row < rows_of(tile); ++row) {
    const char* at = static_cast<const char*>(from) + row * stride;
    std::memcpy(registers.data[tile][row], at, static_cast<size_t>(bytes_of(tile)));
  }
}

inline void tilestored(int tile, void* to, int64_t stride) {
  for (int row = 0; row < rows_of(tile); ++row) {
    char* at = static_cast<char*>(to) + row * stride;
    std::memcpy(at, registers.data[tile][row], static_cast<size_t>(bytes_of(tile)));
  }
}

inline void fault_unless_they_fit(int sum, int a, int b) {
  fault_unless(sum != a && sum != b && a != b);
  fault_unless(rows_of(sum) == rows_of(a) && bytes_of(sum) == bytes_of(b) && bytes_of(a) == 4 * rows_of(b));
}

template <typename Element>
using Row = Element[kMaxSums];

// The floats of a row of pairs: the first ones, and the second ones.
inline void apart(const unsigned char* row, Row<float>& first, Row<float>& second) {
  uint32_t pairs[kMaxSums], bits[2][kMaxSums];
  std::memcpy(pairs, row, sizeof(pairs));
  for (int i = 0; i < kMaxSums; ++i) {
    bits[0][i] = pairs[i] << 16;
    bits[1][i] = pairs[i] & 0xffff0000u;
  }
  std::memcpy(first, bits[0], sizeof(first));
  std::memcpy(second, bits[1], sizeof(second));
}

// Under the control word that the caller has set; not inlined, so that nothing is computed before that.
[[gnu::noinline]] inline void add_products_of_pairs(int sum, int a, int b) {
  const int steps = rows_of(b);
  alignas(64) float weights[2][kMaxRows][kMaxSums], factors[2][kMaxSums];
  for (int step = 0; step < steps; ++step) {
    apart(registers.data[b][step], weights[0][step], weights[1][step]);
  }
  for (int row = 0; row < rows_of(sum); ++row) {
    apart(registers.data[a][row], factors[0], factors[1]);
    alignas(64) float first[kMaxSums] = {}, second[kMaxSums] = {}, total[kMaxSums];
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; i < kMaxSums; ++i) {
        first[i] = __builtin_fmaf(factors[0][step], weights[0][step][i], first[i]);
        second[i] = __builtin_fmaf(factors[1][step], weights[1][step][i], second[i]);
      }
    }
    std::memcpy(total, registers.data[sum][row], sizeof(total));
    for (int i = 0; i < kMaxSums; ++i) total[i] += first[i] + second[i];
    std::memcpy(registers.data[sum][row], total, static_cast<size_t>(bytes_of(sum)));
  }
}

// Whatever the thread's control word says: to nearest, denormal operands and results zero.
inline void tdpbf16ps(int sum, int a, int b) {
  constexpr unsigned kAllMasked = 0x1f80, kFlushed = 0x8040;
  fault_unless_they_fit(sum, a, b);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kAllMasked | kFlushed);
  add_products_of_pairs(sum, a, b);
  _mm_setcsr(before);
}

template <typename Activation, typename Weight>
void add_products_of_quads(int sum, int a, int b) {
  fault_unless_they_fit(sum, a, b);
  for (int row = 0; row < rows_of(sum); ++row) {
    uint32_t total[kMaxSums];
    std::memcpy(total, registers.data[sum][row], sizeof(total));
    for (int step = 0; step < rows_of(b); ++step) {
      Activation x[4];
      Weight w[kMaxSums][4];
      std::memcpy(x, registers.data[a][row] + 4 * step, sizeof(x));
      std::memcpy(w, registers.data[b][step], sizeof(w));
      for (int i = 0; i < kMaxSums; ++i) {
        int32_t products = 0;
        for (int j = 0; j < 4; ++j) products += int32_t{x[j]} * w[i][j];
        total[i] += static_cast<uint32_t>(products);
      }
    }
    std::memcpy(registers.data[sum][row], total, static_cast<size_t>(bytes_of(sum)));
  }
}
inline void tdpbusd(int sum, int a, int b) { add_products_of_quads<uint8_t, int8_t>(sum, a, b); }
inline void tdpbsud(int sum, int a, int b) { add_products_of_quads<int8_t, uint8_t>(sum, a, b); }
inline void tdpbssd(int sum, int a, int b) { add_products_of_quads<int8_t, int8_t>(sum, a, b); }

}  // namespace emulated
