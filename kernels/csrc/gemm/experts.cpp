// A block of experts: rows are normed once, choose their experts, and are multiplied expert by expert; every row then
// sums what its experts gave.
//
// Owns the order of the pairs of a row and an expert: by expert, then by row. Promises: the products are those of
// gemm.h, so that a row's bits do not depend on the rows that chose the same expert. Must not know: layers.
#include "gemm/experts.h"

#include <algorithm>
#include <optional>

#include "gemm/division.h"
#include "gemm/expert_adapters.h"
#include "gemm/expert_pairs.h"
#include "gemm/gemm_deal.h"
#include "gemm/gemm_rows.h"
#include "gemm/norm.h"
#include "gemm/products.h"
#include "ops.h"
#include "runtime/context.h"
#include "weights/kinds.h"

namespace quire {
namespace {

constexpr int64_t kRowsTogether = 8;    // short enough to be dealt evenly
constexpr int64_t kValuesAlone = 8192;  // that the caller works through sooner than it wakes a worker

// body(worker, i) for each of `count` rows of so many values.
template <typename Body>
void each_row(Pool& pool, int64_t count, int64_t values, const Body& body) {
  if (count * values <= kValuesAlone) {
    for (int64_t i = 0; i < count; ++i) body(0, i);
    return;
  }
  pool.run([&](int worker) {
    Piece piece;
    while (pool.first.take(worker, count, kRowsTogether, &piece)) {
      for (int64_t i = piece.begin; i < piece.end; ++i) body(worker, i);
    }
  });
}

// One matrix of every expert, in the matrix of all.
struct Stack {
  Stack(const Linear& matrix, int64_t count, int64_t outputs)
      : all(matrix), n(matrix.gate_up ? 2 * outputs : outputs), stride(panel_count(matrix) / count) {}

  Linear at(int64_t expert) const {
    Linear one = all;
    const int64_t panel = expert * stride, lane = panel * kPanelRows;
    one.n = n;
    one.starts += panel;
    if (one.scales != nullptr) one.scales += lane;
    if (one.sums != nullptr) one.sums += lane;
    if (one.bias != nullptr) one.bias += lane;
    return one;
  }

  const Linear& all;
  int64_t n;       // of one
  int64_t stride;  // panels from one to the next
};

// A counting sort of `index` [number], whose values are experts or -1.
void sort_pairs(const int32_t* index, int64_t number, int64_t experts, PairOrder* pairs) {
  int64_t* starts = pairs->starts;
  std::fill(starts, starts + experts + 1, int64_t{0});
  for (int64_t i = 0; i < number; ++i) {
    if (index[i] >= 0) ++starts[index[i] + 1];
  }
  pairs->num_hit = 0;
  for (int64_t expert = 0; expert < experts; ++expert) {
    if (starts[expert + 1] > 0) pairs->hit[pairs->num_hit++] = static_cast<int32_t>(expert);
    starts[expert + 1] += starts[expert];
  }
  pairs->count = starts[experts];
  int64_t* next = pairs->offsets;  // not used yet
  std::copy(starts, starts + experts, next);
  for (int64_t i = 0; i < number; ++i) {
    pairs->place[i] = index[i] < 0 ? -1 : static_cast<int32_t>(next[index[i]]++);
    if (index[i] >= 0) pairs->order[pairs->place[i]] = static_cast<int32_t>(i);
  }
}

// Rows in the form of a kind, each by itself: [rows][stride bytes], [rows], [rows][groups].
struct Whole {
  char* data;
  int64_t stride;
  float* scales;
  int32_t* sums;
};

template <typename Kind>
int64_t whole_bytes(const Linear& w) {
  return w.k / Kind::kValuesPerStep * 4;
}

// Whether rows are in the form of the kind already.
template <typename Kind>
bool is_whole(const Linear& w) {
  return Kind::kTakesRowsAsIs && w.k == w.columns;
}

template <typename Kind>
void make_whole(const Linear& w, const bf16* x, int64_t row, const Whole& to) {
  Kind::prepare(w, RawRow{x, nullptr, w.columns}, nullptr, to.data + row * to.stride, to.scales + row,
                to.sums + row * sums_per_row<Kind>(w));
}

// The products of all pairs with one of their expert's two matrices.
template <typename Kind>
class Product {
 public:
  // `from`: the rows [number] as they are; with `whole` [number] in the form of the kind. `chosen`: which of them each
  // pair multiplies: its order divided by it; 0: a row of its own.
  Product(const Stack& stack, const PairOrder& pairs, const bf16* from, const Whole* whole, int64_t chosen)
      : stack_(stack),
        pairs_(pairs),
        from_(from),
        whole_(whole),
        chosen_(chosen),
        groups_(sums_per_row<Kind>(stack.all)) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < pairs.num_hit; ++i) {
      const int64_t expert = pairs.hit[i];
      const Linear w = stack.at(expert);
      const int64_t rows = pairs.rows_of(expert);
      own_bytes_ = std::max(own_bytes_, gemm_scratch_bytes(w, rows));
      pairs.offsets[expert] = bytes;
      if (takes_place(rows)) bytes += aligned(placed_bytes<Kind>(w, rows));
    }
    placed_ = bytes > 0;
    own_bytes_ = aligned(own_bytes_);
    data_ = places_.take(bytes);
    scales_ = places_.take(pairs.count * 4);
    sums_ = places_.take(pairs.count * groups_ * 4);
  }

  size_t shared_bytes() const { return places_.end(); }
  size_t own_bytes() const { return static_cast<size_t>(own_bytes_ + whole_bytes<Kind>(stack_.all)); }

  // out [pairs, stride] bf16, in their order, of each expert's panels those of this rank, with what `adapters` add
  // unless it is null. `memory` has shared_bytes, each worker own_bytes.
  void run(Context& context, Epilogue epilogue, bf16* out, int64_t stride, char* memory,
           const ExpertAdapters* adapters) const {
    Pool& pool = context.pool;
    const Panels own_panels = share_of(panel_count(stack_.at(0)), context.ranks.rank, context.ranks.size);
    const int64_t panels = own_panels.count();
    if (panels == 0) return;
    pool.run([&](int worker) {
      char* own = context.own[static_cast<size_t>(worker)].data();
      if (placed_) {
        Piece piece;
        while (pool.first.take(worker, pairs_.count, kRowsTogether, &piece)) {
          for (int64_t pair = piece.begin; pair < piece.end; ++pair) place(pair, own + own_bytes_, memory);
          pool.first.finish(piece.end - piece.begin);
        }
        pool.first.wait(worker, pairs_.count);
      }
      if (adapters != nullptr) adapters->run(worker);
      PanelQueue queue{pool.second, pairs_.num_hit * panels};
      while (queue.fetch(worker)) {
        const int64_t product = queue.held.begin / panels, expert = pairs_.hit[product];
        const int64_t first = pairs_.starts[expert], rows = pairs_.rows_of(expert);
        const char* data = takes_place(rows) ? memory + data_ + pairs_.offsets[expert]
                                             : reinterpret_cast<const char*>(from_ + first * stack_.all.columns);
        const Rows given{rows, data, reinterpret_cast<const float*>(memory + scales_) + first,
                         reinterpret_cast<const int32_t*>(memory + sums_) + first * groups_};
        Deal deal(queue, product * panels, panels, context.fetch);
        const Linear whole = stack_.at(expert);
        Output to{epilogue, out + first * stride, stride, nullptr};
        to.whole = &whole;
        to.first_panel = own_panels.first;
        std::optional<Expander> expander;
        if (const Addend* addend = adapters == nullptr ? nullptr : adapters->of(product)) {
          to.expander = &expander.emplace(*addend, pool.third, adapters->items(), worker);
        }
        gemm_worker(deal, worker, part_of(whole, own_panels), given, to, own);
      }
    });
  }

 private:
  // Whether an expert's rows are copied to places of their own.
  bool takes_place(int64_t rows) const {
    return chosen_ != 0 || !is_whole<Kind>(stack_.all) || takes_tiles<Kind>(stack_.all, rows);
  }

  // `whole`: memory for a row.
  void place(int64_t pair, char* whole, char* memory) const {
    const int64_t expert = std::upper_bound(pairs_.hit, pairs_.hit + pairs_.num_hit, pair,
                                            [&](int64_t at, int32_t e) { return at < pairs_.starts[e + 1]; })[0];
    const int64_t rows = pairs_.rows_of(expert), at = pair - pairs_.starts[expert];
    if (!takes_place(rows)) return;
    const Linear& w = stack_.all;
    float* scales = reinterpret_cast<float*>(memory + scales_);
    int32_t* sums = reinterpret_cast<int32_t*>(memory + sums_);
    const char* row = whole;
    if (chosen_ == 0 && is_whole<Kind>(w)) {
      row = reinterpret_cast<const char*>(from_ + pair * w.columns);
    } else if (chosen_ == 0) {
      make_whole<Kind>(w, from_ + pair * w.columns, 0, {whole, 0, scales + pair, sums + pair * groups_});
    } else {
      const int64_t source = pairs_.order[pair] / chosen_;
      row = whole_->data + source * whole_->stride;
      if constexpr (!Kind::kTakesRowsAsIs) {
        scales[pair] = whole_->scales[source];
        std::copy_n(whole_->sums + source * groups_, groups_, sums + pair * groups_);
      }
    }
    char* data = memory + data_ + pairs_.offsets[expert];
    if (lies_apart<Kind>(w, rows)) return take_apart<Kind>(w, rows, at, row, data);
    std::memcpy(data + at * row_bytes<Kind>(w), row, static_cast<size_t>(row_bytes<Kind>(w)));
  }

  const Stack& stack_;
  const PairOrder& pairs_;
  const bf16* from_;
  const Whole* whole_;
  const int64_t chosen_, groups_;
  bool placed_ = false;
  int64_t own_bytes_ = 0, data_, scales_, sums_;
  Places places_;
};

// What a block of experts gets: `m` rows of `width`.
struct Call {
  const Experts& experts;
  const bf16* x;
  int64_t m, width, top_k;
  const Norm* norm;
  int64_t logits;                          // of a row, from the router
  const StepAdapters* adapters = nullptr;  // null: none adds anything
  int64_t site = -1;                       // of gate_up; down's is the next
};

// out = the weighted sum of a row's experts, in the order of their ranks; with a residual, that and `scale` times the
// sum. Of the columns of some panels.
void sum_row(const Call& call, const PairOrder& pairs, const bf16* found, const float* weights, int64_t row,
             const Panels& panels, float scale, const bf16* residual, bf16* out) {
  const int32_t* place = pairs.place + row * call.top_k;
  weights += row * call.top_k;
  const int64_t end = std::min(call.width, panels.end * kPanelRows);
  for (int64_t at = panels.first * kPanelRows; at < end; at += kLanes) {
    Vec sum = vzero();
    for (int64_t j = 0; j < call.top_k; ++j) {
      if (place[j] < 0) continue;
      sum = vadd(sum, vmul(vset(weights[j]), load_row(found + place[j] * call.width, at, call.width)));
    }
    if (residual != nullptr) {
      sum = vadd(load_row(residual + row * call.width, at, call.width), vmul(sum, vset(scale)));
    }
    bf16 lanes[kLanes];
    vstore_bf16(lanes, sum);
    const auto live = static_cast<size_t>(std::min<int64_t>(kLanes, call.width - at));
    std::memcpy(out + row * call.width + at, lanes, live * sizeof(bf16));
  }
}

// A call's arrays, which lie in the context's memory for rows of experts.
struct Arrays {
  bf16* normed;
  float* logits;
  int32_t* index;  // [m, top_k], of experts, or -1
  float* weights;  // [m, top_k]
  PairOrder pairs;
  Whole whole;
};

Arrays arrays_of(Context& context, const Call& call) {
  const Linear& w = *call.experts.gate_up;
  const int64_t number = call.m * call.top_k, count = call.experts.count;
  int64_t stride = 0, groups = 0;
  with_kind(w.kind, [&](auto kind) {
    using Kind = decltype(kind);
    stride = is_whole<Kind>(w) ? 0 : aligned(whole_bytes<Kind>(w));
    groups = sums_per_row<Kind>(w);
  });
  Places places;
  const int64_t normed = places.take(call.m * call.width * 2), logits = places.take(call.m * call.logits * 4);
  const int64_t index = places.take(number * 4), weights = places.take(number * 4);
  const int64_t starts = places.take((count + 1) * 8), order = places.take(number * 4);
  const int64_t place = places.take(number * 4), hit = places.take(count * 4), offsets = places.take(count * 8);
  const int64_t data = places.take(call.m * stride), scales = places.take(call.m * 4);
  const int64_t sums = places.take(call.m * groups * 4);
  context.experts.reserve(places.end());
  char* base = context.experts.data();
  const auto ints = [&](int64_t at) { return reinterpret_cast<int32_t*>(base + at); };
  const auto floats = [&](int64_t at) { return reinterpret_cast<float*>(base + at); };
  const auto longs = [&](int64_t at) { return reinterpret_cast<int64_t*>(base + at); };
  return {reinterpret_cast<bf16*>(base + normed),
          floats(logits),
          ints(index),
          floats(weights),
          {0, longs(starts), ints(order), ints(place), ints(hit), 0, longs(offsets)},
          {base + data, stride, floats(scales), ints(sums)}};
}

// The rows, normed, and in the form in which the experts multiply them.
void prepare_rows(Context& context, const Call& call, Arrays* arrays) {
  const Linear& w = *call.experts.gate_up;
  with_kind(w.kind, [&](auto kind) {
    using Kind = decltype(kind);
    const bool whole = is_whole<Kind>(w);
    if (!whole || call.norm != nullptr) {
      each_row(context.pool, call.m, call.width, [&](int, int64_t row) {
        const bf16* x = call.x + row * call.width;
        if (call.norm != nullptr) {
          norm_row(x, *call.norm, call.width, arrays->normed + row * call.width);
          x = arrays->normed + row * call.width;
        }
        if (!whole) make_whole<Kind>(w, x, row, arrays->whole);
      });
    }
  });
  if (call.norm == nullptr) arrays->normed = const_cast<bf16*>(call.x);
  if (arrays->whole.stride == 0) {
    arrays->whole.data = reinterpret_cast<char*>(arrays->normed);
    arrays->whole.stride = call.width * 2;
  }
}

// From the experts in arrays->index to the sums of their results.
void multiply_and_sum(Context& context, const Call& call, Arrays* arrays, float scale, const bf16* residual,
                      bf16* out) {
  const Experts& experts = call.experts;
  PairOrder& pairs = arrays->pairs;
  sort_pairs(arrays->index, call.m * call.top_k, experts.count, &pairs);
  bf16* found = nullptr;
  if (pairs.count > 0) {
    const Stack above(*experts.gate_up, experts.count, experts.inner);
    const Stack below(*experts.down, experts.count, call.width);
    const auto added = [&](const Linear& w, int64_t site, const bf16* from, int64_t chosen) {
      std::optional<ExpertAdapters> adapters;
      if (call.adapters != nullptr) adapters.emplace(context, *call.adapters, site, pairs, call.top_k, w, from, chosen);
      return adapters;
    };
    const auto to_add = [](const std::optional<ExpertAdapters>& adapters) {
      return adapters && adapters->items() > 0 ? &*adapters : nullptr;
    };
    with_kind(above.all.kind, [&](auto kind) {
      const auto adapters = added(above.all, call.site, arrays->normed, call.top_k);
      const Product<decltype(kind)> product(above, pairs, arrays->normed, &arrays->whole, call.top_k);
      context.products.reserve(product.shared_bytes());
      context.reserve_own(product.own_bytes());
      context.shared.reserve(
          static_cast<size_t>(aligned(pairs.count * experts.inner * 2) + aligned(pairs.count * call.width * 2)));
      product.run(context, experts.activation, reinterpret_cast<bf16*>(context.shared.data()), experts.inner,
                  context.products.data(), to_add(adapters));
    });
    bf16* inner = reinterpret_cast<bf16*>(context.shared.data());
    const Linear one = above.at(0);
    gather_outputs(context.ranks, inner, pairs.count, experts.inner, panel_count(one), panel_outputs(one),
                   sizeof(bf16));
    found = reinterpret_cast<bf16*>(context.shared.data() + aligned(pairs.count * experts.inner * 2));
    with_kind(below.all.kind, [&](auto kind) {
      const auto adapters = added(below.all, call.site + 1, inner, 0);
      const Product<decltype(kind)> product(below, pairs, inner, nullptr, 0);
      context.products.reserve(product.shared_bytes());
      context.reserve_own(product.own_bytes());
      product.run(context, Epilogue::kStore, found, call.width, context.products.data(), to_add(adapters));
    });
  }
  const int64_t panels = (call.width + kPanelRows - 1) / kPanelRows;
  const Panels own = share_of(panels, context.ranks.rank, context.ranks.size);
  each_row(context.pool, call.m, call.width * call.top_k,
           [&](int, int64_t row) { sum_row(call, pairs, found, arrays->weights, row, own, scale, residual, out); });
  gather_outputs(context.ranks, out, call.m, call.width, panels, kPanelRows, sizeof(bf16));
}

// The experts of rows and their weights, [m, top_k] each, through their logits [m, weight->n].
int32_t choose_experts(Context* context, const Routing& routing, int64_t count, const bf16* rows, int64_t m,
                       float* logits, int32_t* index, float* weights) {
  const int64_t n = routing.weight->n;
  const int32_t failed =
      norm_linear_alone(context, routing.weight, rows, m, routing.norm, logits, Epilogue::kStoreFloat);
  if (failed != 0) return failed;
  return guarded(context, [&] {
    context->reserve_own(static_cast<size_t>(routing_floats(count)) * sizeof(float));
    each_row(context->pool, m, n, [&](int worker, int64_t row) {
      float* own = logits + row * n;
      for (int64_t part = count; part < n; part += count) {
        for (int64_t i = 0; i < count; ++i) own[i] += own[part + i];
      }
      float* scratch = reinterpret_cast<float*>(context->own[static_cast<size_t>(worker)].data());
      route_row(routing, own, count, scratch, index + row * routing.top_k, weights + row * routing.top_k);
    });
  });
}

}  // namespace

QUIRE_API int32_t quire_route(Context* context, const Routing* routing, int64_t count, const bf16* x, int64_t m,
                              float* logits, int32_t* index, float* weights) {
  return m == 0 ? 0 : choose_experts(context, *routing, count, x, m, logits, index, weights);
}

QUIRE_API int32_t quire_mix_experts(Context* context, const Routing* routing, const Experts* experts, const bf16* x,
                                    int64_t m, const Norm* norm, float scale, const bf16* residual, bf16* out,
                                    const StepAdapters* adapters, int64_t site) {
  if (m == 0) return 0;
  const int64_t width = experts->gate_up->columns, count = experts->count;
  const Call call{*experts, x, m, width, routing->top_k, norm, routing->weight->n, adapters, site};
  Arrays arrays;
  int32_t failed = guarded(context, [&] {
    arrays = arrays_of(*context, call);
    prepare_rows(*context, call, &arrays);
  });
  if (failed == 0) {
    const bf16* own = routing->norm == nullptr ? arrays.normed : x;
    failed = choose_experts(context, *routing, count, own, m, arrays.logits, arrays.index, arrays.weights);
  }
  if (failed != 0) return failed;
  return guarded(context, [&] { multiply_and_sum(*context, call, &arrays, scale, residual, out); });
}

QUIRE_API int32_t quire_given_experts(Context* context, const Experts* experts, const bf16* x, int64_t m, int64_t top_k,
                                      const int64_t* index, const float* weights, bf16* out) {
  return guarded(context, [&] {
    const Call call{*experts, x, m, experts->gate_up->columns, top_k, nullptr, 0};
    Arrays arrays = arrays_of(*context, call);
    prepare_rows(*context, call, &arrays);
    for (int64_t i = 0; i < m * top_k; ++i) {
      const bool known = index[i] >= 0 && index[i] < experts->count;
      arrays.index[i] = known ? static_cast<int32_t>(index[i]) : -1;
    }
    std::copy(weights, weights + m * top_k, arrays.weights);
    multiply_and_sum(*context, call, &arrays, 1.0f, nullptr, out);
  });
}

QUIRE_API int32_t quire_gate_rows(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                  int64_t columns, bf16* wide) {
  if (m == 0) return 0;
  int32_t failed = guarded(context, [&] { context->experts.reserve(static_cast<size_t>(m) * sizeof(float)); });
  if (failed != 0) return failed;
  float* gates = reinterpret_cast<float*>(context->experts.data());
  failed = norm_linear_alone(context, w, x, m, norm, gates, Epilogue::kStoreFloat);
  if (failed != 0) return failed;
  return guarded(context, [&] {
    each_row(context->pool, m, columns, [&](int, int64_t row) {
      const Vec gate = vdiv(vset(1.0f), vadd(vset(1.0f), vexp(vsub(vzero(), vset(gates[row])))));
      bf16* values = wide + row * columns;
      for (int64_t at = 0; at < columns; at += kLanes) {
        bf16 lanes[kLanes];
        vstore_bf16(lanes, vmul(load_row(values, at, columns), gate));
        const auto live = static_cast<size_t>(std::min<int64_t>(kLanes, columns - at));
        std::memcpy(values + at, lanes, live * sizeof(bf16));
      }
    });
  });
}

}  // namespace quire
