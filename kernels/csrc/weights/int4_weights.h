// int4 weights with a scale per group of 32, and int32 sums within a group.
//
// A group is 64 scales of a byte (scale.h), then 4 steps of [64][4 bytes] whose low nibbles are k 4j.. and high nibbles
// k 16 + 4j... Nibbles are offset by 8; the activations' sums, known when they are prepared, take that out again.
// Owns what is particular to the kind, see kinds.h. Must not know: threads, what becomes of the values.
#pragma once

#include "gemm/norm.h"
#include "simd/prefetch.h"
#include "simd/simd.h"
#include "simd/unroll.h"
#include "weights/group_scale.h"
#include "weights/source.h"

namespace quire {

#if defined(QUIRE_AMX)
// Sixteen lanes of a group as tiles take them: scales as floats, and steps of four signed bytes, k in order.
struct WideGroup {
  float scales[kLanes];
  int32_t steps[kGroup / 4][kLanes];
};
#endif

struct Int4Weights {
  static constexpr bool kStored = false;
  static constexpr bool kGrouped = true;
  static constexpr bool kMayBeCoded = false;
  static constexpr int64_t kValuesPerStep = 4;  // of an activation row
  static constexpr int kParts = 1;
  static constexpr bool kChained = false;
#if defined(QUIRE_AMX)
  // By counting: of one group and one row, `tile` takes about 20 cycles for the 64 lanes of a panel. Tiles need some 60
  // to widen the group, whatever the rows, and then about 20 for 16 lanes and up to 16 rows, of which loads and stores
  // are the limit: level at seven rows.
  static constexpr int64_t kTiledFrom = 8;
#else
  static constexpr int64_t kTiledFrom = 0;
#endif
  static constexpr int64_t kGroupBytes = kPanelRows + kPanelRows * kGroup / 2;  // of a panel: scales, then nibbles

  // Panels.
  static int64_t panel_bytes(const Linear& w) { return w.k / kGroup * kGroupBytes; }
  static int64_t packed_bytes(const Linear& w, const Source&, int64_t) { return panel_bytes(w); }

  static void pack(const Linear& w, const Source& from, int64_t panel, char*, const Panel& to) {
    constexpr int64_t kHalf = kGroup / 2;
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const bf16* row = source_row(w, from, panel, lane);
      const float unit = row == nullptr ? 1.0f : row_unit(row, w.columns);
      to.scales[lane] = unit;
      const bool broken = unit != unit;
      const int64_t columns = row == nullptr || broken ? 0 : w.columns;
      const Vec relative = vset(broken ? 1.0f : 1.0f / unit);
      for (int64_t g = 0; g < w.k / kGroup; ++g) {
        char* group = to.weights + g * kGroupBytes;
        float x[kGroup];
        vstore(x, vmul(load_row(row, g * kGroup, columns), relative));
        vstore(x + kHalf, vmul(load_row(row, g * kGroup + kHalf, columns), relative));
        const uint8_t scale = best_scale(x);
        group[lane] = static_cast<char>(scale);
        const Vec inverse = vset(1.0f / scale_of(scale));
        const Ints low = to_ints(vadd(nibbles(vload(x), inverse), vset(8.0f)));
        const Ints high = to_ints(vadd(nibbles(vload(x + kHalf), inverse), vset(8.0f)));
        uint8_t halves[2][kHalf];
        store_bytes(halves[0], low);
        store_bytes(halves[1], high);
        for (int64_t b = 0; b < kHalf; ++b) {
          char* at = group + kPanelRows + ((b / 4) * kPanelRows + lane) * 4 + b % 4;
          *at = static_cast<char>(halves[0][b] | halves[1][b] << 4);
        }
      }
    }
  }

  // Rows: signed bytes with one scale, and 8 times the sum of every group.
  static constexpr bool kTakesRowsAsIs = false;
  static void prepare(const Linear& w, const RawRow& row, bf16* normed, char* data, float* scale, int32_t* group_sums) {
    *scale = quantize_row_signed(row.normed(normed), w.columns, w.k, reinterpret_cast<int8_t*>(data), group_sums);
  }

  // Products. There are two sets of accumulators, of groups and of rows.
  static constexpr int kTileRows = kRegisters >= 32 ? 6 : kRegisters >= 8 ? 4 : 2;
  static constexpr int pass_vecs(int rows) {
    if (kRegisters >= 32) return rows <= 3 ? kVecs : kVecs / 2;
    return rows == 1 ? kVecs : 1;
  }

  // `kRows` activation rows against the panel's output rows from lane `first` on, kWide vectors of them. Plain loops:
  // the compiler unrolls them as well, and turns them into vectors where it has to.
  template <int kRows, int kWide>
  [[gnu::noinline]] static void tile(const int8_t* a, int64_t k, const int32_t* group_sums, const char* w,
                                     int64_t first, float* sums, Cold cold, const Ahead& ahead) {
    const int64_t groups = k / kGroup;
    const int64_t turn = groups - kPrefetchBytes / kGroupBytes;
    Vec acc[kRows][kWide];
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kWide; ++v) acc[r][v] = vzero();
    }
    for (int64_t g = 0; g < groups; ++g, w += kGroupBytes) {
      const char* next = g < turn ? w + (groups - turn) * kGroupBytes : ahead.follows + (g - turn) * kGroupBytes;
      prefetch<kPanelRows>(cold, next);
      for (int64_t line = 0; line < ahead.lines; ++line) {
        __builtin_prefetch(ahead.at + g * ahead.per_step + line * 64, 0, 2);
      }
      Ints part[kRows][kWide];
      for (int r = 0; r < kRows; ++r) {
        for (int v = 0; v < kWide; ++v) part[r][v] = nibble_start(group_sums[r * groups + g]);
      }
      for (int j = 0; j < 4; ++j) {
        prefetch<kStepBytes>(cold, next + kPanelRows + j * kStepBytes);
        const char* nibbles = w + kPanelRows + j * kStepBytes + first * 4;
        const char* x = reinterpret_cast<const char*>(a) + g * kGroup + 4 * j;
        Ints low[kWide], high[kWide];
        for (int v = 0; v < kWide; ++v) {
          const Ints both = iload(nibbles + v * kLanes * 4);
          low[v] = low_nibbles(both);
          high[v] = high_nibbles(both);
        }
        for (int r = 0; r < kRows; ++r) {
          const Ints x_low = quad_factor(x + r * k), x_high = quad_factor(x + r * k + kGroup / 2);
          for (int v = 0; v < kWide; ++v) part[r][v] = nibble_dot(part[r][v], low[v], x_low);
          for (int v = 0; v < kWide; ++v) part[r][v] = nibble_dot(part[r][v], high[v], x_high);
        }
      }
      for (int v = 0; v < kWide; ++v) {
        const Vec scale = vload_scales(reinterpret_cast<const uint8_t*>(w) + first + v * kLanes);
        for (int r = 0; r < kRows; ++r) {
          const Vec sum = to_vec(nibble_total(part[r][v], group_sums[r * groups + g]));
          acc[r][v] = vfma(sum, scale, acc[r][v]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kWide; ++v) vstore(sums + r * kPanelRows + first + v * kLanes, acc[r][v]);
    }
  }

#if defined(QUIRE_AMX)
  // Vector `v` of a group's lanes. Eight is taken from the nibbles: sums need no correction.
  static void widen(const char* group, int v, WideGroup* to) {
    vstore(to->scales, vload_scales(reinterpret_cast<const uint8_t*>(group) + v * kLanes));
    constexpr int kSteps = kGroup / 8;  // of two nibbles in a byte
    for (int step = 0; step < kSteps; ++step) {
      const Ints both = iload(group + kPanelRows + step * kStepBytes + v * kLanes * 4);
      istore(to->steps[step], less_eight(low_nibbles(both)));
      istore(to->steps[kSteps + step], less_eight(high_nibbles(both)));
    }
  }
#endif

  // Sums times the row's unit and the activation row's scale.
  class Scale {
   public:
    Scale(const Linear& w, const Rows& rows, int64_t panel) : row_scales_(rows.scales) {
      unrolled<kVecs>([&](auto v) { units_[v] = vload(w.scales + panel * kPanelRows + v * kLanes); });
    }
    Vec value(int v, int64_t row, const float* sums) const {
      return vmul(vload(sums), vmul(units_[v], vset(row_scales_[row])));
    }

   private:
    const float* row_scales_;
    Vec units_[kVecs];
  };

#if defined(QUIRE_AMX)
 private:
  // Of nibbles in bytes, as signed bytes.
  static Ints less_eight(Ints nibbles) {
    const __m512i values =
        _mm512_set4_epi32(0x07060504, 0x03020100, static_cast<int>(0xfffefdfcu), static_cast<int>(0xfbfaf9f8u));
    return {_mm512_shuffle_epi8(values, nibbles.v)};
  }
#endif
};

}  // namespace quire
