// Norms of query and key heads, rotary embedding, and the write of keys and values into the pool: one pass over a row.
//
// Promises: a row never sees another; computed in fp32 from the bf16 projection and rounded once. Workers may write
// neighbouring slots at the same time. Must not know: sequences, how frequencies are derived.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "attention/attention.h"
#include "attention/attention_quantize.h"
#include "attention/head_share.h"
#include "ops.h"
#include "runtime/context.h"

namespace quire {
namespace {

constexpr int64_t kMostDim = 512;
constexpr int64_t kMostHalf = kMostDim / 2;

// A head's two halves, each padded with zeros to whole vectors.
struct Halves {
  alignas(64) float first[kMostHalf] = {};
  alignas(64) float second[kMostHalf] = {};
};

class Row {
 public:
  Row(const AttentionShape& shape, const HeadShare& share, int64_t half) : shape_(shape), share_(share), half_(half) {
    if (shape.row_norms) return;
    if (shape.q_norm != nullptr) split(shape.q_norm, &q_norm_);
    if (shape.k_norm != nullptr) split(shape.k_norm, &k_norm_);
  }

  // Before a row's heads.
  void begin(const float* rope, const bf16* q, const bf16* k) {
    split(rope, &angles_);
    if (!shape_.row_norms) return;
    q_scale_ = row_scale(q, share_.all);
    k_scale_ = row_scale(k, share_.all_kv);
  }

  void query(int64_t index, const bf16* head, bf16* out) {
    if (shape_.row_norms) split(shape_.q_norm + index * 2 * half_, &q_norm_);
    turn(head, shape_.q_norm == nullptr ? nullptr : &q_norm_, q_scale_);
    if (half_ % kLanes == 0) {
      for (int64_t i = 0; i < half_; i += kLanes) {
        vstore_bf16(out + i, vload(turned_.first + i));
        vstore_bf16(out + half_ + i, vload(turned_.second + i));
      }
      return;
    }
    for (int64_t i = 0; i < half_; ++i) {
      out[i] = to_bf16(turned_.first[i]);
      out[half_ + i] = to_bf16(turned_.second[i]);
    }
  }

  // The rotated key as floats [2 * half].
  void key(int64_t index, const bf16* head, float* out) {
    if (shape_.row_norms) split(shape_.k_norm + index * 2 * half_, &k_norm_);
    turn(head, shape_.k_norm == nullptr ? nullptr : &k_norm_, k_scale_);
    std::memcpy(out, turned_.first, static_cast<size_t>(half_) * 4);
    std::memcpy(out + half_, turned_.second, static_cast<size_t>(half_) * 4);
  }

  // The value [2 * half] as it is stored: the head itself, or normed in `room`.
  const bf16* value(const bf16* head, bf16* room) {
    if (!shape_.v_norm) return head;
    load(head);
    const float scale = inverse_root(add_squares(vzero()), 2 * half_);
    for (int64_t i = 0; i < half_; ++i) {
      room[i] = to_bf16(x_.first[i] * scale);
      room[half_ + i] = to_bf16(x_.second[i] * scale);
    }
    return room;
  }

 private:
  void split(const float* from, Halves* to) const {
    std::memcpy(to->first, from, static_cast<size_t>(half_) * 4);
    std::memcpy(to->second, from + half_, static_cast<size_t>(half_) * 4);
  }

  float inverse_root(Vec squares, int64_t count) const {
    return 1.0f / std::sqrt(lane_sum(squares) / static_cast<float>(count) + shape_.norm_eps);
  }

  // Of all heads of a row together: the same order of addition as within a head, head by head.
  float row_scale(const bf16* row, int64_t heads) {
    Vec squares = vzero();
    for (int64_t h = 0; h < heads; ++h) {
      load(row + h * 2 * half_);
      squares = add_squares(squares);
    }
    return inverse_root(squares, heads * 2 * half_);
  }

  Vec add_squares(Vec squares) const {
    for (int64_t i = 0; i < half_; i += kLanes) {
      const Vec a = vload(x_.first + i), b = vload(x_.second + i);
      squares = vfma(b, b, vfma(a, a, squares));
    }
    return squares;
  }

  void load(const bf16* head) {
    if (half_ % kLanes == 0) {
      for (int64_t i = 0; i < half_; i += kLanes) {
        vstore(x_.first + i, vload_bf16(head + i));
        vstore(x_.second + i, vload_bf16(head + half_ + i));
      }
    } else {
      for (int64_t i = 0; i < half_; ++i) {
        x_.first[i] = to_float(head[i]);
        x_.second[i] = to_float(head[half_ + i]);
      }
    }
  }

  // `row_scale`: of the head's whole row, where that is normed as one.
  void turn(const bf16* head, const Halves* norm, float row_scale) {
    load(head);
    Vec scale = vset(1.0f);
    if (norm != nullptr) {
      scale = vset(shape_.row_norms ? row_scale : inverse_root(add_squares(vzero()), 2 * half_));
    }
    for (int64_t i = 0; i < half_; i += kLanes) {
      Vec a = vload(x_.first + i), b = vload(x_.second + i);
      if (norm != nullptr) {
        a = vmul(vmul(a, scale), vload(norm->first + i));
        b = vmul(vmul(b, scale), vload(norm->second + i));
      }
      const Vec cosine = vload(angles_.first + i), sine = vload(angles_.second + i);
      vstore(turned_.first + i, vsub(vmul(a, cosine), vmul(b, sine)));
      vstore(turned_.second + i, vfma(b, cosine, vmul(a, sine)));
    }
  }

  const AttentionShape& shape_;
  const HeadShare& share_;
  const int64_t half_;
  float q_scale_ = 1.0f, k_scale_ = 1.0f;
  Halves q_norm_, k_norm_, angles_, x_, turned_;
};

void write_bf16(char* unit, int64_t offset, int64_t d, const float* key, const bf16* value) {
  bf16 rounded[kMostDim];
  for (int64_t i = 0; i < d; i += kLanes) vstore_bf16(rounded + i, vload(key + i));
  bf16* keys = reinterpret_cast<bf16*>(unit) + 2 * offset;
  for (int64_t i = 0; i < d; i += 2) std::memcpy(keys + i * kUnit, rounded + i, 4);
  bf16* values = reinterpret_cast<bf16*>(unit) + (kUnit + offset / 2 * 2) * d;
  for (int64_t i = 0; i < d; i += kLanes) store_halves(values + 2 * i, offset % 2, value + i);
}

// Signed bytes of x [d] plus `offset` into `bytes`; returns their scale, NaN where x is not finite.
template <typename T, typename Load>
float quantize(const T* x, int64_t d, const Load& load, int32_t offset, uint8_t* bytes) {
  const Largest largest = largest_of(x, d, load);
  const Vec per_step = vset(largest.value > kNothing ? 127.0f / largest.value : 0.0f);
  for (int64_t i = 0; i < d; i += kLanes) {
    const Ints value = to_ints(bounded(vmul(load(x + i), per_step), 127.0f));
    store_bytes(bytes + i, iadd(value, iset(offset)));
  }
  return largest.value / 127.0f + largest.nan;
}

void write_int8(char* unit, int64_t offset, int64_t d, const float* key, const bf16* value) {
  uint8_t bytes[kMostDim];
  float* scales = reinterpret_cast<float*>(unit + 2 * kUnit * d);
  scales[offset] = quantize(key, d, [](const float* p) { return vload(p); }, 128, bytes);
  char* keys = unit + 4 * offset;
  for (int64_t i = 0; i < d; i += 4) std::memcpy(keys + i * kUnit, bytes + i, 4);
  scales[kUnit + offset] = quantize(value, d, [](const bf16* p) { return vload_bf16(p); }, 0, bytes);
  uint8_t* values = reinterpret_cast<uint8_t*>(unit) + (kUnit + offset / 4 * 4) * d + offset % 4;
  for (int64_t i = 0; i < d; ++i) values[4 * i] = bytes[i];
}

bool rope_write(Context* context, const AttentionShape& shape, const HeadShare& share, const KvPool& pool,
                int64_t layer, const AttentionStep& step, const bf16* qkv, const float* rope, int64_t rope_rows,
                bf16* q) {
  const int64_t d = shape.head_dim, heads = shape.num_heads, kv_heads = shape.num_kv_heads;
  const int64_t block_size = pool.units * kUnit;
  std::atomic<bool> valid{true};
  const auto write_row = [&](int64_t r, Row* work) {
    const int64_t position = step.positions[r], slot = step.slots[r];
    if (position < 0 || position >= rope_rows || slot < 0 || slot >= pool.num_blocks * block_size) {
      valid = false;
      return;
    }
    const bf16* row = qkv + r * (share.all + 2 * share.all_kv) * d;
    const bf16* keys = row + share.all * d;
    work->begin(rope + position * d, row, keys);
    for (int64_t h = 0; h < heads; ++h) work->query(h, row + (share.first + h) * d, q + (r * heads + h) * d);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t offset = slot % block_size;
      char* unit = unit_address(pool, slot / block_size, layer, h, offset / kUnit);
      bf16 normed[kMostDim];
      const bf16* value = work->value(keys + (share.all_kv + share.first_kv + h) * d, normed);
      float key[kMostDim];
      work->key(h, keys + (share.first_kv + h) * d, key);
      if (pool.kind == KvKind::kBf16) {
        write_bf16(unit, offset % kUnit, d, key, value);
      } else {
        write_int8(unit, offset % kUnit, d, key, value);
      }
    }
  };
  // Positions of a unit share cache lines: one worker should write them.
  const int64_t together = std::clamp<int64_t>(step.rows / (4 * context->pool.size()), 1, kUnit);
  context->pool.run([&](int worker) {
    Row work(shape, share, d / 2);
    Piece rows;
    while (context->pool.first.take(worker, step.rows, together, &rows)) {
      for (int64_t r = rows.begin; r < rows.end; ++r) write_row(r, &work);
    }
  });
  return valid;
}

}  // namespace

int32_t rope_write_share(Context* context, const AttentionShape* shape, const HeadShare& share, const KvPool* pool,
                         int64_t layer, const AttentionStep* step, const bf16* qkv, const float* rope,
                         int64_t rope_rows, bf16* q) {
  bool valid = true;
  const int32_t failed = guarded(
      context, [&] { valid = rope_write(context, *shape, share, *pool, layer, *step, qkv, rope, rope_rows, q); });
  return valid ? failed : kOutOfRange;
}

QUIRE_API int32_t quire_rope_write(Context* context, const AttentionShape* shape, const KvPool* pool, int64_t layer,
                                   const AttentionStep* step, const bf16* qkv, const float* rope, int64_t rope_rows,
                                   bf16* q) {
  const HeadShare all{0, 0, shape->num_heads, shape->num_kv_heads};
  return rope_write_share(context, shape, all, pool, layer, step, qkv, rope, rope_rows, q);
}

}  // namespace quire
