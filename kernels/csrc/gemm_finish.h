// What becomes of a row's sums over one panel: scales, bias, and an epilogue into memory.
//
// Promises: a row alone. Must not know: how the sums came about, who computes which panel.
#pragma once

#include <algorithm>

#include "gemm_tile.h"

namespace quire {

// Sums of one row of one panel as floats, bias added.
inline Vec finished(const Linear& w, const Rows& rows, int64_t row, int64_t lane, const float* sums) {
  Vec value;
  switch (w.kind) {
    case WeightKind::kBf16: value = vload(sums); break;
    case WeightKind::kInt8:
      value = vmul(to_vec(isub(iload(sums), iload(w.sums + lane))), vmul(vload(w.scales + lane), vset(rows.scales[row])));
      break;
    default: value = vmul(vload(sums), vset(rows.scales[row]));
  }
  return w.bias == nullptr ? value : vadd(value, vload(w.bias + lane));
}

// Stores up to 16 columns. The last ones of a matrix whose n is no multiple of 16 go through a full vector of memory.
template <bool kWhole>
inline void store(const Output& out, int64_t at, int64_t width, Vec value) {
  const size_t count = static_cast<size_t>(width);
  if (out.epilogue == Epilogue::kAdd) {
    if (kWhole) {
      value = vadd(value, vload_bf16(out.residual + at));
    } else {
      bf16 lanes[kLanes] = {};
      std::memcpy(lanes, out.residual + at, count * sizeof(bf16));
      value = vadd(value, vload_bf16(lanes));
    }
  }
  if (out.epilogue == Epilogue::kStoreFloat) {
    float* to = static_cast<float*>(out.data) + at;
    if (kWhole) return vstore(to, value);
    float lanes[kLanes];
    vstore(lanes, value);
    std::memcpy(to, lanes, count * sizeof(float));
  } else {
    bf16* to = static_cast<bf16*>(out.data) + at;
    if (kWhole) return vstore_bf16(to, value);
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
    const bool wins = best->column < 0 || lanes[i] > best->value ||
                      (lanes[i] == best->value && first + i < best->column);
    if (!wins) continue;
    best->value = lanes[i];
    best->column = first + i;
  }
}

inline void finish_row(const Linear& w, const Rows& rows, const Output& out, int64_t row, int64_t panel,
                       const float* sums) {
  Vec value[kVecs];
  for (int v = 0; v < kVecs; ++v) {
    value[v] = finished(w, rows, row, panel * kPanelRows + v * kLanes, sums + v * kLanes);
  }
  if (out.epilogue == Epilogue::kBest) return keep_best(value, panel * kPanelRows, w.n, out.best + row);
  int vecs = kVecs;
  int64_t first = panel * kPanelRows, columns = w.n;
  if (out.epilogue == Epilogue::kSiluMul) {
    vecs = kVecs / 2;
    first /= 2;
    columns /= 2;
    for (int v = 0; v < vecs; ++v) value[v] = vmul(vsilu(value[v]), value[vecs + v]);
  }
  for (int v = 0; v < vecs; ++v) {
    const int64_t column = first + v * kLanes;
    const int64_t width = std::min<int64_t>(kLanes, columns - column);
    if (width <= 0) return;
    const int64_t at = row * out.stride + column;
    if (width == kLanes) {
      store<true>(out, at, width, value[v]);
    } else {
      store<false>(out, at, width, value[v]);
    }
  }
}

}  // namespace quire
