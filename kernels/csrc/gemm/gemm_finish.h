// What becomes of the sums of a tile's rows over one panel: scales, bias, and an epilogue into memory.
//
// Promises: a row alone. Must not know: how the sums came about, who computes which panel.
#pragma once

#include <algorithm>

#include "gemm/gemm.h"
#include "simd/simd.h"
#include "simd/unroll.h"

namespace quire {

// Turns sums of one panel into values. What all rows share is read once for a tile.
template <typename Kind>
class Scaled {
 public:
  Scaled(const Linear& w, const Rows& rows, int64_t panel)
      : scale_(w, rows, panel), bias_(w.bias == nullptr ? nullptr : w.bias + panel * kPanelRows) {}

  void row(int64_t row, const float* sums, Vec (&value)[kVecs]) const {
    unrolled<kVecs>([&](auto v) { value[v] = scale_.value(v, row, sums + v * kLanes); });
    if (bias_ == nullptr) return;
    unrolled<kVecs>([&](auto v) { value[v] = vadd(value[v], vload(bias_ + v * kLanes)); });
  }

 private:
  typename Kind::Scale scale_;
  const float* bias_;
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

// Of equal values the first column stays, in whatever order the panels reach a worker. Values that may not be the best
// are looked at all the same: they tell whether the row is finite.
inline void keep_best(const Vec* value, int64_t first, int64_t columns, uint64_t allowed, Best* best) {
  static_assert(kPanelRows == 64, "one bit for each column of a panel");
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
  if (live < kPanelRows) {
    allowed &= (uint64_t{1} << live) - 1;
  } else if (best->column >= 0 && !(lane_max(top) >= best->value)) {
    return;
  }
  for (; allowed != 0; allowed &= allowed - 1) {
    const int64_t i = __builtin_ctzll(allowed);
    const bool wins =
        best->column < 0 || lanes[i] > best->value || (lanes[i] == best->value && first + i < best->column);
    if (!wins) continue;
    best->value = lanes[i];
    best->column = first + i;
  }
}

// What a gate-up pair's epilogue makes of both.
template <Epilogue kEpilogue>
inline Vec gated(Vec gate, Vec up) {
#define QUIRE_GATED(member, name, function) \
  if constexpr (kEpilogue == Epilogue::member) return function(gate, up);
  QUIRE_ACTIVATIONS(QUIRE_GATED)
#undef QUIRE_GATED
}

template <typename Kind, Epilogue kEpilogue>
void finish(const Linear& w, const Rows& rows, const Output& out, int64_t row, int64_t live, int64_t panel,
            const float* sums) {
  constexpr bool kGated = is_gated(kEpilogue);
  constexpr int kOut = kGated ? kVecs / 2 : kVecs;
  const int64_t first = panel * kOut * kLanes, columns = kGated ? w.n / 2 : w.n;
  const Scaled<Kind> scaled(w, rows, panel);
  for (int64_t r = row; r < row + live; ++r, sums += kPanelRows) {
    Vec value[kVecs];
    scaled.row(r, sums, value);
    if (const float* added = out.expander == nullptr ? nullptr : out.expander->of(r, panel)) {
      unrolled<kVecs>([&](auto v) { value[v] = vadd(value[v], vload(added + v * kLanes)); });
    }
    if constexpr (kEpilogue == Epilogue::kBest) {
      const uint64_t allowed = out.allowed == nullptr ? ~uint64_t{0} : out.allowed[r * panel_count(w) + panel];
      keep_best(value, first, columns, allowed, out.best + r);
      continue;
    }
    if constexpr (kGated) {
      unrolled<kOut>([&](auto v) { value[v] = gated<kEpilogue>(value[v], value[kOut + v]); });
    }
    if constexpr (kEpilogue == Epilogue::kAdd) {  // times 1 is exact
      unrolled<kOut>([&](auto v) { value[v] = vmul(value[v], vset(out.scale)); });
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
template <typename Kind>
inline void finish_tile(const Linear& multiplied, const Rows& rows, const Output& out, int64_t row, int64_t live,
                        int64_t panel_of_multiplied, const float* sums) {
  const Linear& w = out.whole == nullptr ? multiplied : *out.whole;
  const int64_t panel = out.first_panel + panel_of_multiplied;
  switch (out.epilogue) {
    case Epilogue::kStore: return finish<Kind, Epilogue::kStore>(w, rows, out, row, live, panel, sums);
    case Epilogue::kStoreFloat: return finish<Kind, Epilogue::kStoreFloat>(w, rows, out, row, live, panel, sums);
    case Epilogue::kAdd: return finish<Kind, Epilogue::kAdd>(w, rows, out, row, live, panel, sums);
#define QUIRE_CASE(member, name, function) \
  case Epilogue::member: return finish<Kind, Epilogue::member>(w, rows, out, row, live, panel, sums);
      QUIRE_ACTIVATIONS(QUIRE_CASE)
#undef QUIRE_CASE
    case Epilogue::kBest: return finish<Kind, Epilogue::kBest>(w, rows, out, row, live, panel, sums);
  }
}

}  // namespace quire
