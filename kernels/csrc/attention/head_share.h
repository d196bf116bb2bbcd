// Which heads a rank has: of the queries, and the keys and values that they see.
//
// Promises: every head is some rank's; where there are more ranks than heads of keys, several have the same one. Must
// not know: products.
#pragma once

#include "attention/attention.h"
#include "gemm/division.h"

namespace quire {

struct Context;

// The heads of a rank, whose numbers its AttentionShape tells, among all those of a row of queries, keys and values.
struct HeadShare {
  int64_t first, first_kv;  // the rank's
  int64_t all, all_kv;      // heads of a row

  // `width`: of a row.
  static HeadShare of(const AttentionShape& shape, int64_t width, const Ranks& ranks) {
    const int64_t all = int64_t{shape.num_heads} * ranks.size, all_kv = (width / shape.head_dim - all) / 2;
    return {int64_t{shape.num_heads} * ranks.rank, all_kv * ranks.rank / ranks.size, all, all_kv};
  }

  // The panels of the projection to such rows that this rank needs: all of them as its share of the columns, where
  // heads The panels of the projection to such rows that hold this rank's heads.
  PanelRanges panels(const AttentionShape& shape) const {
    const int64_t d = shape.head_dim, keys = all + first_kv, values = keys + all_kv;
    PanelRanges found{{}, 0};
    found.add(first * d, (first + shape.num_heads) * d);
    found.add(keys * d, (keys + shape.num_kv_heads) * d);
    found.add(values * d, (values + shape.num_kv_heads) * d);
    return found;
  }
};

// As quire_rope_write, from rows of all heads, of which this rank's are written.
int32_t rope_write_share(Context* context, const AttentionShape* shape, const HeadShare& share, const KvPool* pool,
                         int64_t layer, const AttentionStep* step, const bf16* qkv, const float* rope,
                         int64_t rope_rows, bf16* q);

}  // namespace quire
