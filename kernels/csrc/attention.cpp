// Causal attention of a step's rows over the paged pool.
//
// Owns the division of the work. Promises: every worker takes pieces as it becomes free; a row's result does not depend
// on how many workers there are. Must not know: how keys and values are stored.
#include "attention.h"

#include <atomic>

#include "attention_bf16.h"
#include "attention_int8.h"
#include "attention_walk.h"
#include "context.h"

namespace quire {
namespace {

constexpr int64_t kTaskRows = 96;  // rows times heads of a kv head that share each tile while it is in the cache
constexpr int64_t kItemsPerWorker = 4;

// One segment of one task, or all of them.
struct Item {
  int64_t task, segment;
};

class Plan {
 public:
  Plan(const AttentionShape& shape, const AttentionStep& step, int workers) {
    const int64_t heads = shape.num_heads / shape.num_kv_heads;
    const int64_t limit = std::max<int64_t>(1, kTaskRows / heads);
    for (int64_t s = 0; s < step.sequences; ++s) {
      const int64_t first_row = step.query_starts[s], rows = step.query_starts[s + 1] - first_row;
      const int64_t first_position = step.context_lens[s] - rows;
      if (first_row < 0 || rows < 0 || first_row + rows > step.rows || first_position < 0) {
        valid = false;
        return;
      }
      const int64_t count = (rows + limit - 1) / limit;
      if (count > 0) most_rows = std::max(most_rows, (rows + count - 1) / count * heads);
      // The last rows first: they see most, and what is left for the end should be small.
      for (int64_t i = count - 1; i >= 0; --i) {
        const int64_t from = rows * i / count, to = rows * (i + 1) / count;
        tasks.push_back({s, first_row + from, first_position + from, to - from});
      }
    }
    const int64_t wanted = workers == 1 ? 0 : kItemsPerWorker * workers;
    split = static_cast<int64_t>(tasks.size()) * shape.num_kv_heads < wanted;
    for (size_t t = 0; t < tasks.size(); ++t) {
      const int64_t segments = split ? tasks[t].segments() : 1;
      first_items.push_back(static_cast<int64_t>(items.size()));
      for (int64_t i = 0; i < segments; ++i) items.push_back({static_cast<int64_t>(t), i});
    }
  }

  std::vector<Task> tasks;
  std::vector<Item> items;  // for each kv head
  std::vector<int64_t> first_items;  // of each task
  int64_t most_rows = 0;    // of a task
  bool split = false;       // items are segments, to be joined when all are done
  bool valid = true;
};

template <typename Kv>
bool attend(Context* context, const AttentionShape& shape, const KvPool& pool, int64_t layer, const AttentionStep& step,
            const bf16* q, bf16* out) {
  Pool& workers = context->pool;
  const Plan plan(shape, step, workers.size());
  if (!plan.valid) return false;
  const int64_t d = shape.head_dim, kv_heads = shape.num_kv_heads;
  const int64_t rows = plan.most_rows;
  const int64_t state = rows * state_stride(d);  // floats
  const int64_t state_bytes = aligned(state * 4);
  context->reserve_own(static_cast<size_t>(2 * state_bytes + Walk<Kv>::scratch_bytes(rows, d)));
  const int64_t num_items = static_cast<int64_t>(plan.items.size()) * kv_heads;
  if (plan.split) context->shared.reserve(static_cast<size_t>(num_items * state_bytes));
  std::atomic<bool> valid{true};

  workers.run([&](int worker) {
    char* own = context->own[static_cast<size_t>(worker)].data();
    float* part = reinterpret_cast<float*>(own);
    float* total = reinterpret_cast<float*>(own + state_bytes);
    Walk<Kv> walk(own + 2 * state_bytes, rows, shape, pool, step, layer);
    const auto task_of = [&](int64_t item) -> const Task& {
      return plan.tasks[static_cast<size_t>(plan.items[static_cast<size_t>(item / kv_heads)].task)];
    };
    const auto segment_of = [&](int64_t item) { return plan.items[static_cast<size_t>(item / kv_heads)].segment; };
    const auto first_segment = [&](int64_t item) {
      return plan.split ? segment_of(item) : first_visible(task_of(item).first_position, shape.window) / kSegment;
    };
    int64_t item, following, end;
    bool taken = workers.first.take(num_items, 1, &following, &end);
    while (taken) {
      item = following;
      taken = workers.first.take(num_items, 1, &following, &end);  // early, so that its memory is on the way
      const Task& task = task_of(item);
      const int64_t head = item % kv_heads;
      const int64_t first = first_segment(item), last = plan.split ? first : task.segments() - 1;
      walk.set_queries(task, head, q);
      for (int64_t i = first; i <= last; ++i) {
        Tile after{};
        if (i < last) {
          after = walk.first_tile(task, head, i + 1);
        } else if (taken) {
          after = walk.first_tile(task_of(following), following % kv_heads, first_segment(following));
        }
        float* to = plan.split ? reinterpret_cast<float*>(context->shared.data() + item * state_bytes) : part;
        if (!walk.segment(task, head, i, after, to)) valid = false;
        if (!plan.split && first < last) walk.join(task, i, part, total);
      }
      if (!plan.split) walk.write(task, head, first < last ? total : part, out);
      workers.first.finish(1);
    }
    if (!plan.split) return;
    workers.first.wait(num_items);
    int64_t index;
    while (workers.second.take(static_cast<int64_t>(plan.tasks.size()) * kv_heads, 1, &index, &end)) {
      const size_t t = static_cast<size_t>(index / kv_heads);
      const int64_t head = index % kv_heads;
      for (int64_t i = 0; i < plan.tasks[t].segments(); ++i) {
        const char* from = context->shared.data() + ((plan.first_items[t] + i) * kv_heads + head) * state_bytes;
        walk.join(plan.tasks[t], i, reinterpret_cast<const float*>(from), total);
      }
      walk.write(plan.tasks[t], head, total, out);
    }
  });
  return valid;
}

}  // namespace
}  // namespace quire

// q [rows, num_heads, head_dim] bf16 -> out, of the same shape. The rows' own keys and values are in the pool already.
QUIRE_API int32_t quire_attention(quire::Context* context, const quire::AttentionShape* shape,
                                  const quire::KvPool* pool, int64_t layer, const quire::AttentionStep* step,
                                  const quire::bf16* q, quire::bf16* out) {
  bool valid = true;
  const int32_t failed = quire::guarded(context, [&] {
    const bool is_bf16 = pool->kind == quire::KvKind::kBf16;
    valid = is_bf16 ? quire::attend<quire::Bf16Kv>(context, *shape, *pool, layer, *step, q, out)
                    : quire::attend<quire::Int8Kv>(context, *shape, *pool, layer, *step, q, out);
  });
  return valid ? failed : quire::kOutOfRange;
}
