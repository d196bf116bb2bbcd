// Attention of a step's rows over the paged pool.
//
// Owns the division of the work. Promises: every worker takes pieces as it becomes free; a row's result does not depend
// on how many workers there are. Must not know: how keys and values are stored.
#include "attention/attention.h"

#include <atomic>

#include "attention/attention_amx.h"
#include "attention/attention_amx_int8.h"
#include "attention/attention_bf16.h"
#include "attention/attention_int8.h"
#include "attention/attention_walk.h"
#include "ops.h"
#include "runtime/context.h"

namespace quire {
namespace {

// Rows times heads of a kv head that share each tile while it is in the cache: whole groups of tiles, where there are.
constexpr int64_t kTaskRows = kMostGroupRows > kBlockRows ? 128 : 96;
constexpr int64_t kItemsPerWorker = 4;

#if defined(QUIRE_AMX)
using KvOfBf16 = AmxKv;
using KvOfInt8 = AmxInt8Kv;
#else
using KvOfBf16 = Bf16Kv;
using KvOfInt8 = Int8Kv;
#endif

// Some kv heads of one task, and of its segments one or all. A block's heads lie side by side in memory: few rows,
// which wait for memory alone, are faster with many heads at once.
struct Item {
  int64_t task, head, heads, segment;
};
constexpr int64_t kAllSegments = -1;

class Plan {
 public:
  Plan(const AttentionShape& shape, const AttentionStep& step, int workers)
      : group_heads_(shape.num_heads / shape.num_kv_heads), kv_heads_(shape.num_kv_heads) {
    const int64_t limit = most_queries(step, workers);
    for (int64_t s = 0; s < step.sequences; ++s) {
      const int64_t first_row = step.query_starts[s], rows = step.query_starts[s + 1] - first_row;
      const int64_t first_position = step.context_lens[s] - rows;
      if (first_row < 0 || rows < 0 || first_row + rows > step.rows || first_position < 0) {
        valid = false;
        return;
      }
      const int64_t count = (rows + limit - 1) / limit;
      // The last rows first: they see most, and what is left for the end should be small.
      for (int64_t i = count - 1; i >= 0; --i) {
        const int64_t from = rows * i / count, to = rows * (i + 1) / count;
        const int64_t end = end_visible(first_position + to - 1, shape, step.context_lens[s]);
        tasks.push_back({s, first_row + from, first_position + from, to - from, end});
      }
    }
    const int64_t wanted = workers == 1 ? 0 : kItemsPerWorker * workers;
    split = static_cast<int64_t>(tasks.size()) * kv_heads_ < wanted;
    for (size_t t = 0; t < tasks.size(); ++t) {
      first_items.push_back(static_cast<int64_t>(items.size()));
      if (split) {
        add_segments(t);
      } else {
        add_heads(t, wanted);
      }
    }
    for (const Item& item : items) {
      const int64_t rows = tasks[static_cast<size_t>(item.task)].queries * group_heads_ * item.heads;
      most_rows = std::max(most_rows, rows);
    }
  }

  std::vector<Task> tasks;
  std::vector<Item> items;
  std::vector<int64_t> first_items;  // of each task
  int64_t most_rows = 0;             // of an item
  bool split = false;                // items are segments, to be joined when all are done
  bool valid = true;

 private:
  // Of a task: as many as share each tile well, fewer where some workers would have no segment of a head.
  int64_t most_queries(const AttentionStep& step, int workers) const {
    const int64_t fewest = std::max<int64_t>(1, kBlockRows / group_heads_);
    int64_t most = std::max<int64_t>(1, kTaskRows / group_heads_);
    for (; most > fewest; most = (most + 1) / 2) {
      int64_t segments = 0;
      for (int64_t s = 0; s < step.sequences; ++s) {
        const int64_t rows = step.query_starts[s + 1] - step.query_starts[s];
        segments += (rows + most - 1) / most * ((step.context_lens[s] + kSegment - 1) / kSegment);
      }
      if (segments * kv_heads_ >= workers) break;
    }
    return most;
  }

  // Each segment of each head alone: item first_items[t] + segment * kv heads + head.
  void add_segments(size_t t) {
    for (int64_t i = 0; i < tasks[t].segments(); ++i) {
      for (int64_t head = 0; head < kv_heads_; ++head) items.push_back({static_cast<int64_t>(t), head, 1, i});
    }
  }

  void add_heads(size_t t, int64_t wanted) {
    const int64_t num_tasks = static_cast<int64_t>(tasks.size());
    const int64_t fit = std::max<int64_t>(1, kTaskRows / (tasks[t].queries * group_heads_));
    const int64_t parts = std::max((wanted + num_tasks - 1) / num_tasks, (kv_heads_ + fit - 1) / fit);
    const int64_t count = std::clamp<int64_t>(parts, 1, kv_heads_);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t head = kv_heads_ * i / count, end = kv_heads_ * (i + 1) / count;
      items.push_back({static_cast<int64_t>(t), head, end - head, kAllSegments});
    }
  }

  const int64_t group_heads_, kv_heads_;
};

template <typename Kv>
bool attend(Context* context, const AttentionShape& shape, const KvPool& pool, int64_t layer, const AttentionStep& step,
            const bf16* q, bf16* out) {
  Pool& workers = context->pool;
  const Plan plan(shape, step, workers.size());
  if (!plan.valid) return false;
  const int64_t d = shape.head_dim, kv_heads = shape.num_kv_heads;
  const int64_t state_bytes = aligned(plan.most_rows * state_stride(d) * 4);
  context->reserve_own(static_cast<size_t>(2 * state_bytes + Walk<Kv>::scratch_bytes(plan.most_rows, d)));
  const int64_t num_items = static_cast<int64_t>(plan.items.size());
  if (plan.split) context->shared.reserve(static_cast<size_t>(num_items * state_bytes));
  const auto state_of = [&](int64_t item) {
    return reinterpret_cast<float*>(context->shared.data() + item * state_bytes);
  };
  const auto item_at = [&](int64_t item) -> const Item& { return plan.items[static_cast<size_t>(item)]; };
  const auto task_of = [&](const Item& item) -> const Task& { return plan.tasks[static_cast<size_t>(item.task)]; };
  const auto first_segment = [&](const Item& item) {
    if (item.segment != kAllSegments) return item.segment;
    return first_visible(task_of(item).first_position, shape.window) / kSegment;
  };
  std::atomic<bool> valid{true};

  workers.run([&](int worker) {
    [[maybe_unused]] const typename Kv::Mode mode{};
    char* own = context->own[static_cast<size_t>(worker)].data();
    float* part = reinterpret_cast<float*>(own);
    float* total = reinterpret_cast<float*>(own + state_bytes);
    Walk<Kv> walk(own + 2 * state_bytes, plan.most_rows, shape, pool, step, layer, context->fetch);
    Piece piece;
    while (workers.first.take(worker, num_items, 1, &piece)) {
      const Item& item = item_at(piece.begin);
      const Task& task = task_of(item);
      const int64_t first = first_segment(item), last = plan.split ? first : task.segments() - 1;
      const Heads heads{item.head, item.heads};
      walk.set_queries(task, heads, q);
      for (int64_t i = first; i <= last; ++i) {
        Tile after{};
        if (i < last) {
          after = walk.first_tile(task, item.head, i + 1);
        } else if (piece.next >= 0) {
          const Item& next = item_at(piece.next);
          after = walk.first_tile(task_of(next), next.head, first_segment(next));
        }
        if (!walk.segment(task, heads, i, after, plan.split ? state_of(piece.begin) : part)) valid = false;
        if (!plan.split && first < last) walk.join(task, heads, i, part, total);
      }
      if (!plan.split) walk.write(task, heads, first < last ? total : part, out);
      workers.first.finish(1);
    }
    if (!plan.split) return;
    workers.first.wait(worker, num_items);
    while (workers.second.take(worker, static_cast<int64_t>(plan.tasks.size()) * kv_heads, 1, &piece)) {
      const size_t t = static_cast<size_t>(piece.begin / kv_heads);
      const Heads head{piece.begin % kv_heads, 1};
      for (int64_t i = 0; i < plan.tasks[t].segments(); ++i) {
        walk.join(plan.tasks[t], head, i, state_of(plan.first_items[t] + i * kv_heads + head.first), total);
      }
      walk.write(plan.tasks[t], head, total, out);
    }
  });
  return valid;
}

}  // namespace

QUIRE_API int32_t quire_attention(Context* context, const AttentionShape* shape, const KvPool* pool, int64_t layer,
                                  const AttentionStep* step, const bf16* q, bf16* out) {
  bool valid = true;
  const int32_t failed = guarded(context, [&] {
    const bool is_bf16 = pool->kind == KvKind::kBf16;
    valid = is_bf16 ? attend<KvOfBf16>(context, *shape, *pool, layer, *step, q, out)
                    : attend<KvOfInt8>(context, *shape, *pool, layer, *step, q, out);
  });
  return valid ? failed : kOutOfRange;
}

}  // namespace quire
