// int8 weights with a scale per output row, and int32 sums: a step is four of k.
//
// Activations are bytes offset by 128, since products take one unsigned side; the offset's share of a sum is known when
// the weights are packed. Owns what is particular to the kind, see kinds.h. Must not know: threads, tiles, what becomes
// of the values.
#pragma once

#include <cstring>

#include "gemm/norm.h"
#include "simd/simd.h"
#include "simd/unroll.h"
#include "weights/source.h"

namespace quire {

struct Int8Weights {
  static constexpr bool kStored = false;
  static constexpr bool kGrouped = false;
  static constexpr bool kMayBeCoded = false;
  static constexpr int64_t kValuesPerStep = 4;
  static constexpr int kParts = kQuadParts;
  static constexpr bool kChained = false;
#if defined(QUIRE_AMX)
  static constexpr int64_t kTiledFrom = 16;  // fewer rows wait for memory either way
#else
  static constexpr int64_t kTiledFrom = 0;
#endif

  // Panels.
  static int64_t panel_bytes(const Linear& w) { return w.k * kPanelRows; }
  static int64_t packed_bytes(const Linear& w, const Source&, int64_t) { return panel_bytes(w); }

  // `stage` has room for two plain panels.
  static void pack(const Linear& w, const Source& from, int64_t panel, char* stage, const Panel& to) {
    int8_t* rows = reinterpret_cast<int8_t*>(stage);
    int32_t* group_sums = reinterpret_cast<int32_t*>(stage + kPanelRows * w.k);
    for (int64_t lane = 0; lane < kPanelRows; ++lane) {
      const bf16* row = source_row(w, from, panel, lane);
      const int64_t columns = row == nullptr ? 0 : w.columns;
      to.scales[lane] = quantize_row_signed(row, columns, w.k, rows + lane * w.k, group_sums);
      to.sums[lane] = 0;
      for (int64_t g = 0; g < w.k / kGroup; ++g) to.sums[lane] += 16 * group_sums[g];  // these are 8 times the sum
    }
    transpose(stage, w.k / 4, to.weights);
  }

  // Rows: bytes offset by 128, with one scale.
  static constexpr bool kTakesRowsAsIs = false;
  static void prepare(const Linear& w, const RawRow& row, bf16* normed, char* data, float* scale, int32_t*) {
    *scale = quantize_row_unsigned(row.normed(normed), w.columns, w.k, reinterpret_cast<uint8_t*>(data));
  }

  // Two of a step's four bytes, in 16 bits each.
  static void store_part(const char* step, int part, char* to) {
    uint8_t bytes[4];
    std::memcpy(bytes, step, 4);
    const uint16_t both[2] = {bytes[part], bytes[part + 2]};
    std::memcpy(to, both, 4);
  }

  // Products.
  using Sum = Ints;
  using Lane = Ints;
  using Part = Ints;
  static Sum zero() { return izero(); }
  static Sum load_sum(const float* p) { return iload(p); }
  static void store_sum(float* p, Sum s) { istore(p, s); }
  static Lane load(const char* p) { return iload(p); }
  template <int kPart>
  static Part part(Lane w) {
    return quad_part<kPart>(w);
  }
  static Part factor(const char* p) { return quad_factor(p); }
  static Sum dot(Sum sum, Part w, Part a) { return quad_product(sum, w, a); }

#if defined(QUIRE_AMX)
  template <int kSum, int kA, int kB>
  static void tile_dot() {
    tile_dot_u8s8<kSum, kA, kB>();
  }
#endif

  // Sums less the offset's share, times the scales of both rows.
  class Scale {
   public:
    Scale(const Linear& w, const Rows& rows, int64_t panel) : row_scales_(rows.scales) {
      const int64_t lane = panel * kPanelRows;
      unrolled<kVecs>([&](auto v) {
        scales_[v] = vload(w.scales + lane + v * kLanes);
        offsets_[v] = iload(w.sums + lane + v * kLanes);
      });
    }
    Vec value(int v, int64_t row, const float* sums) const {
      const Vec exact = to_vec(isub(iload(sums), offsets_[v]));
      return vmul(exact, vmul(scales_[v], vset(row_scales_[row])));
    }

   private:
    const float* row_scales_;
    Vec scales_[kVecs];
    Ints offsets_[kVecs];
  };
};

}  // namespace quire
