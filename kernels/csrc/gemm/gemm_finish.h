// What becomes of the sums of a tile's rows over one panel: scales, bias, and an epilogue into memory.
//
// Promises: a row alone. Must not know: how the sums came about, who computes which panel.
#pragma once

#include <algorithm>

#include "gemm/gemm_tile.h"

namespace quire {

// Turns sums of one panel into values. What all rows share is read once for a tile.
template <WeightKind kKind>
class Scaled {
 public:
  Scaled(const Linear& w, const Rows& rows, int64_t panel) : row_scales_(rows.scales) {
    const int64_t lane = panel * kPanelRows;
    bias_ = w.bias == nullptr ? nullptr : w.bias + lane;
    unrolled<kVecs>([&](auto v) {
      if constexpr (kKind != WeightKind::kBf16) scales_[v] = vload(w.scales + lane + v * kLanes);
      if constexpr (kKind == WeightKind::kInt8) offsets_[v] = iload(w.sums + lane + v * kLanes);
    });
  }

  void row(int64_t row, const float* sums, Vec (&value)[kVecs]) const {
    unrolled<kVecs>([&](auto v) {
      if constexpr (kKind == WeightKind::kBf16) {
        value[v] = vload(sums + v * kLanes);
      } else if constexpr (kKind == WeightKind::kInt8) {
        const Vec exact = to_vec(isub(iload(sums + v * kLanes), offsets_[v]));
        value[v] = vmul(exact, vmul(scales_[v], vset(row_scales_[row])));
      } else {
        value[v] = vmul(vload(sums + v * kLanes), vmul(scales_[v], vset(row_scales_[row])));
      }
    });
    if (bias_ == nullptr) return;
    unrolled<kVecs>([&](auto v) { value[v] = vadd(value[v], vload(bias_ + v * kLanes)); });
  }

 private:
  const float* row_scales_;
  const float* bias_;
  Vec scales_[kVecs];
  Ints offsets_[kVecs];
};

// Stores up to 16 columns. The last ones of a matrix whose n is no multiple of 16 go through a full vector of memory.
template <Epilogue kEpilogue, bool kWhole>
inline void store(const Output& out, int64_t at, int64_t width, Vec value) {
  const size_t count = static_cast<size_t>(width);
  if constexpr (kEpilogue == Epilogue::kAdd) {
    if constexpr (kWhole) {
      value = vadd(value, vload_bf16(out.residual + at));
    } else {
      bf16 lanes[kLanes] = {};
      std::memcpy(lanes, out.residual + at, count * sizeof(bf16));
      value = vadd(value, vload_bf16(lanes));
    }
  }
  if constexpr (kEpilogue == Epilogue::kStoreFloat) {
    float* to = static_cast<float*>(out.data) + at;
    if constexpr (kWhole) return vstore(to, value);
    float lanes[kLanes];
    vstore(lanes, value);
    std::memcpy(to, lanes, count * sizeof(float));
  } else {
    bf16* to = static_cast<bf16*>(out.data) + at;
    if constexpr (kWhole) return vstore_bf16(to, value);
    bf16 lanes[kLanes];
    vstore_bf16(lanes, value);
    std::memcpy(to, lanes, count * sizeof(bf16));
  }
}

// Of equal values the first column stays, in whatever order the panels reach a worker.
inline void keep_best(const Vec* value, int64_t first, int64_t columns, Best* best) {
  float lanes[kPanelRows];
  Vec probe = vzero();  // x * 0 is not 0 for what is not finite
  Vec top = value[0];
  for (int v = 0; v < kVecs; ++v) {
    probe = vfma(value[v], vzero(), probe);
    top = vmax(top, value[v]);
    vstore(lanes + v * kLanes, value[v]);
  }
  if (!(lane_sum(probe) == 0.0f)) best->finite = false;
  const int64_t live = std::min<int64_t>(kPanelRows, columns - first);
  if (live == kPanelRows && best->column >= 0 && !(lane_max(top) >= best->value)) return;
  for (int64_t i = 0; i < live; ++i) {
    const bool wins =
        best->column < 0 || lanes[i] > best->value || (lanes[i] == best->value && first + i < best->column);
    if (!wins) continue;
    best->value = lanes[i];
    best->column = first + i;
  }
}

template <WeightKind kKind, Epilogue kEpilogue>
void finish(const Linear& w, const Rows& rows, const Output& out, int64_t row, int64_t live, int64_t panel,
            const float* sums) {
  constexpr bool kGated = kEpilogue == Epilogue::kSiluMul;
  constexpr int kOut = kGated ? kVecs / 2 : kVecs;
  const int64_t first = panel * kOut * kLanes, columns = kGated ? w.n / 2 : w.n;
  const Scaled<kKind> scaled(w, rows, panel);
  for (int64_t r = row; r < row + live; ++r, sums += kPanelRows) {
    Vec value[kVecs];
    scaled.row(r, sums, value);
    if constexpr (kEpilogue == Epilogue::kBest) {
      keep_best(value, first, columns, out.best + r);
      continue;
    }
    if constexpr (kGated) {
      unrolled<kOut>([&](auto v) { value[v] = vmul(vsilu(value[v]), value[kOut + v]); });
    }
    const int64_t at = r * out.stride + first;
    if (first + kOut * kLanes <= columns) {
      unrolled<kOut>([&](auto v) { store<kEpilogue, true>(out, at + v * kLanes, kLanes, value[v]); });
      continue;
    }
    for (int v = 0; v < kOut; ++v) {
      const int64_t width = std::min<int64_t>(kLanes, columns - first - v * kLanes);
      if (width > 0) store<kEpilogue, false>(out, at + v * kLanes, width, value[v]);
    }
  }
}

// The rows [row, row + live) of one panel, sums [live][64].
template <WeightKind kKind>
inline void finish_tile(const Linear& w, const Rows& rows, const Output& out, int64_t row, int64_t live, int64_t panel,
                        const float* sums) {
  switch (out.epilogue) {
    case Epilogue::kStore: return finish<kKind, Epilogue::kStore>(w, rows, out, row, live, panel, sums);
    case Epilogue::kStoreFloat: return finish<kKind, Epilogue::kStoreFloat>(w, rows, out, row, live, panel, sums);
    case Epilogue::kAdd: return finish<kKind, Epilogue::kAdd>(w, rows, out, row, live, panel, sums);
    case Epilogue::kSiluMul: return finish<kKind, Epilogue::kSiluMul>(w, rows, out, row, live, panel, sums);
    default: return finish<kKind, Epilogue::kBest>(w, rows, out, row, live, panel, sums);
  }
}

}  // namespace quire
