// Projections with what surrounds them, each in one run of the pool: norm, quantise, multiply, epilogue.
//
// Owns where prepared rows live. Promises: a row's result does not depend on who prepared it. Must not know: layers.
#include <algorithm>

#include "gemm/gemm.h"
#include "gemm/gemm_rows.h"
#include "gemm/shrinking.h"
#include "ops.h"
#include "runtime/context.h"
#include "weights/kinds.h"

namespace quire {
namespace {

// Few values are prepared by every worker for itself, sooner than by each a part and a wait for the others.
constexpr int64_t kRedundantValues = 4096;
constexpr int64_t kPreparedTogether = 8;  // rows: short enough to be dealt evenly

struct Input {
  const bf16* data;  // [m, columns]
  int64_t m;
  const Norm* norm;                      // of the columns, or null: none
  const Shrinking* shrinking = nullptr;  // what adapters need of the rows, or null: nothing
};

template <typename Kind>
int64_t rows_bytes(const Linear& w, int64_t m) {
  return aligned(placed_bytes<Kind>(w, m)) + aligned(m * 4) + aligned(m * sums_per_row<Kind>(w) * 4);
}

// Prepared rows: data, scales and group sums, one after the other.
template <typename Kind>
struct Prepared {
  Prepared(const Linear& w, int64_t m, char* memory)
      : data(memory),
        scales(reinterpret_cast<float*>(memory + aligned(placed_bytes<Kind>(w, m)))),
        sums(reinterpret_cast<int32_t*>(reinterpret_cast<char*>(scales) + aligned(m * 4))) {}
  char* data;
  float* scales;
  int32_t* sums;
};

// `normed` [columns] and `whole` [k] are the worker's own.
template <typename Kind>
void prepare_row(const Linear& w, const Input& in, int64_t row, const Prepared<Kind>& to, bf16* normed, char* whole) {
  const bool apart = lies_apart<Kind>(w, in.m);
  char* data = apart ? whole : to.data + row * row_bytes<Kind>(w);
  const RawRow raw{in.data + row * w.columns, in.norm, w.columns};
  Kind::prepare(w, raw, normed, data, to.scales + row, to.sums + row * sums_per_row<Kind>(w));
  if (apart) take_apart<Kind>(w, in.m, row, whole, to.data);
}

// Bytes of all prepared rows, and of a worker's own memory.
struct Memory {
  int64_t prepared, own;
};

// prepare(row, memory, own) for all rows of k values, then multiply(worker, memory, own) by every worker. Between both
// what adapters need.
template <typename Prepare, typename Multiply>
void run_prepared(Context& context, const Input& in, int64_t k, const Memory& sizes, const Prepare& prepare,
                  const Multiply& multiply) {
  Pool& pool = context.pool;
  const int64_t m = in.m;
  const Shrinking* shrinking = in.shrinking;
  const bool redundant = shrinking == nullptr && m * k <= kRedundantValues;
  if (!redundant) context.shared.reserve(static_cast<size_t>(sizes.prepared));
  context.reserve_own(static_cast<size_t>(sizes.own + (redundant ? sizes.prepared : 0)));
  pool.run([&](int worker) {
    char* own = context.own[static_cast<size_t>(worker)].data();
    char* memory = redundant ? own + sizes.own : context.shared.data();
    if (redundant) {
      for (int64_t row = 0; row < m; ++row) prepare(row, memory, own);
    } else {
      Piece rows;
      while (pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          prepare(row, memory, own);
          if (shrinking != nullptr) shrinking->prepare(row);
        }
        pool.first.finish(rows.end - rows.begin);
      }
      pool.first.wait(worker, m);
    }
    if (shrinking != nullptr) shrinking->run(worker);
    multiply(worker, memory, own);
  });
}

// Calls multiply(out) with what is the worker's own.
template <typename Multiply>
void with_own(const Context& context, const Input& in, Output out, int worker, const Multiply& multiply) {
  if (out.best != nullptr) out.best += worker * in.m;
  if (in.shrinking == nullptr) return multiply(out);
  Expander expander(in.shrinking->addend(), context.pool.third, in.shrinking->items(), worker);
  out.expander = &expander;
  multiply(out);
}

template <typename Kind>
void project_as(Context& context, const Linear& w, const Input& in, const Output& out) {
  if (in.m == 0) return;
  Pool& pool = context.pool;
  const int64_t sums_bytes = aligned(gemm_scratch_bytes(w, in.m));
  const int64_t whole_bytes = aligned(w.k * 2);
  const bool as_is = Kind::kTakesRowsAsIs && !takes_tiles<Kind>(w, in.m) && in.norm == nullptr && w.k == w.columns;
  if (as_is) {
    context.reserve_own(static_cast<size_t>(sums_bytes));
    return pool.run([&](int worker) {
      char* own = context.own[static_cast<size_t>(worker)].data();
      if (in.shrinking != nullptr) in.shrinking->run(worker);
      with_own(context, in, out, worker, [&](const Output& to) {
        gemm_worker(pool.second, worker, w, {in.m, in.data, nullptr, nullptr}, to, own);
      });
    });
  }
  const auto prepare = [&](int64_t row, char* memory, char* own) {
    char* normed = own + sums_bytes;
    prepare_row<Kind>(w, in, row, Prepared<Kind>(w, in.m, memory), reinterpret_cast<bf16*>(normed),
                      normed + whole_bytes);
  };
  const Memory sizes{rows_bytes<Kind>(w, in.m), sums_bytes + 2 * whole_bytes};
  run_prepared(context, in, w.k, sizes, prepare, [&](int worker, char* memory, char* own) {
    const Prepared<Kind> rows(w, in.m, memory);
    with_own(context, in, out, worker, [&](const Output& to) {
      gemm_worker(pool.second, worker, w, {in.m, rows.data, rows.scales, rows.sums}, to, own);
    });
  });
}

// A matrix whose parts are of several kinds, which all multiply rows of bf16, each with the sums of groups of its own.
void project_stacked(Context& context, const Linear& w, const Input& in, const Output& out) {
  using Kind = StoredWeights<Nibbles>;  // as any
  if (in.m == 0) return;
  const int64_t panels = panel_count(w), sums_bytes = aligned(gemm_scratch_bytes(w, in.m));
  int64_t end = aligned(placed_bytes<Kind>(w, in.m));
  int64_t sums_at[kMostParts];
  for (int64_t part = 0; part < w.num_parts; ++part) {
    sums_at[part] = end;
    end += aligned(in.m * sums_per_row<Kind>(w.parts[part]) * 4);
  }
  const auto sums_of = [&](char* memory, int64_t part) { return reinterpret_cast<float*>(memory + sums_at[part]); };
  const auto prepare = [&](int64_t row, char* memory, char* own) {
    const bool apart = lies_apart<Kind>(w, in.m);
    char* data = apart ? own + sums_bytes : memory + row * row_bytes<Kind>(w);
    Bf16Weights::prepare(w, {in.data + row * w.columns, in.norm, w.columns}, nullptr, data, nullptr, nullptr);
    for (int64_t part = 0; part < w.num_parts; ++part) {
      float* sums = sums_of(memory, part) + row * sums_per_row<Kind>(w.parts[part]);
      Kind::add_up(w.parts[part], reinterpret_cast<const bf16*>(data), sums);
    }
    if (apart) take_apart<Kind>(w, in.m, row, data, memory);
  };
  const Memory sizes{end, sums_bytes + aligned(w.k * 2)};
  run_prepared(context, in, w.k, sizes, prepare, [&](int worker, char* memory, char* own) {
    with_own(context, in, out, worker, [&](Output to) {
      to.whole = &w;
      PanelQueue queue{context.pool.second, panels};
      while (queue.fetch(worker)) {
        int64_t part = 0;
        for (to.first_panel = 0; queue.held.begin >= to.first_panel + panel_count(w.parts[part]); ++part) {
          to.first_panel += panel_count(w.parts[part]);
        }
        const Linear& multiplied = w.parts[part];
        Deal deal(queue, to.first_panel, panel_count(multiplied));
        const auto* sums = reinterpret_cast<const int32_t*>(sums_of(memory, part));
        gemm_worker(deal, worker, multiplied, {in.m, memory, nullptr, sums}, to, own);
      }
    });
  });
}

void project(Context& context, const Linear& w, const Input& in, const Output& out) {
  if (w.kind == WeightKind::kStacked) return project_stacked(context, w, in, out);
  with_kind(w.kind, [&](auto kind) { project_as<decltype(kind)>(context, w, in, out); });
}

void project_adapted(Context& context, const Linear& w, Input in, const Output& out, const StepAdapters* adapters,
                     int64_t site) {
  if (adapters == nullptr) return project(context, w, in, out);
  const Shrinking shrinking(context, *adapters, site, w, in.data, in.m, in.norm);
  if (shrinking.any()) in.shrinking = &shrinking;
  project(context, w, in, out);
}

}  // namespace

QUIRE_API int32_t quire_norm_linear(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                                    void* out, Epilogue epilogue, const StepAdapters* adapters, int64_t site) {
  return guarded(context, [&] {
    const Output to{epilogue, out, w->gate_up ? w->n / 2 : w->n, nullptr};
    project_adapted(*context, *w, {x, m, norm}, to, adapters, site);
  });
}

QUIRE_API int32_t quire_linear_add(Context* context, const Linear* w, const bf16* x, int64_t m, float scale,
                                   const bf16* residual, bf16* out, const StepAdapters* adapters, int64_t site) {
  return guarded(context, [&] {
    Output to{Epilogue::kAdd, out, w->n, residual};
    to.scale = scale;
    project_adapted(*context, *w, {x, m, nullptr}, to, adapters, site);
  });
}

QUIRE_API int32_t quire_norm_add(Context* context, const bf16* y, int64_t m, int64_t columns, const Norm* norm,
                                 float scale, bf16* residual) {
  return guarded(context, [&] {
    context->pool.run([&](int worker) {
      Piece rows;
      while (context->pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          norm_add_row(y + row * columns, *norm, columns, scale, residual + row * columns);
        }
      }
    });
  });
}

QUIRE_API int32_t quire_mul_sigmoid(Context* context, const bf16* gate, int64_t m, int64_t columns, bf16* x) {
  return guarded(context, [&] {
    context->pool.run([&](int worker) {
      Piece rows;
      while (context->pool.first.take(worker, m, kPreparedTogether, &rows)) {
        for (int64_t row = rows.begin; row < rows.end; ++row) {
          mul_sigmoid_row(gate + row * columns, columns, x + row * columns);
        }
      }
    });
  });
}

QUIRE_API int32_t quire_greedy(Context* context, const Linear* w, const bf16* x, int64_t m, const Norm* norm,
                               const uint64_t* allowed, int64_t* columns, uint8_t* finite) {
  return guarded(context, [&] {
    const int64_t workers = context->pool.size();
    context->between.reserve(static_cast<size_t>(workers * m) * sizeof(Best));
    Best* best = reinterpret_cast<Best*>(context->between.data());
    std::fill(best, best + workers * m, Best{0.0f, -1, true});
    project(*context, *w, {x, m, norm}, {Epilogue::kBest, nullptr, 0, nullptr, best, allowed});
    for (int64_t row = 0; row < m; ++row) {
      Best first{0.0f, -1, true};
      for (int64_t worker = 0; worker < workers; ++worker) {
        const Best& one = best[worker * m + row];
        first.finite = first.finite && one.finite;
        const bool wins =
            first.column < 0 || one.value > first.value || (one.value == first.value && one.column < first.column);
        if (one.column >= 0 && wins) {
          first.value = one.value;
          first.column = one.column;
        }
      }
      columns[row] = first.column;
      finite[row] = first.finite;
    }
  });
}

}  // namespace quire
