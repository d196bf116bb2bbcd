// Matrices as others quantised them, weight = table[code] * scale + offset: what lies where in a panel.
//
// Scales and offsets belong to a lane's group of columns. A panel is groups, one after the other: a header of 64 scales
// and 64 offsets, then blocks of 16 steps, or of 8 where groups have 16 columns. Groups whose scales are multiples of a
// unit lie in spans of 256 columns, which begin with 64 units.
//
// Owns that layout. Promises: headers and blocks are multiples of 64 bytes. Must not know: what codes stand for.
#pragma once

#include <algorithm>

#include "simd/simd.h"
#include "weights/linear.h"

namespace quire {

constexpr int64_t kSpanColumns = 256;
constexpr int64_t kTableEntries = 32;  // of 16 values, twice: shuffles look at five bits

// `code_bits`: 4, 6 or 8.
struct StoredLayout {
  StoredLayout(const Linear& w, int code_bits)
      : steps(w.group % 32 == 0 ? 16 : 8),
        blocks(w.k / (2 * steps)),
        group(w.group / (2 * steps)),
        groups((blocks + group - 1) / group),
        block_bytes(2 * steps * kPanelRows * code_bits / 8),
        offsets_at(kPanelRows * scale_bytes(w.scale_form)),
        header_bytes(offsets_at + kPanelRows * offset_bytes(w.offset_form)) {
    offset_units_at = w.scale_form == ScaleForm::kUnits ? kUnitBytes : 0;
    units_bytes = offset_units_at + (w.offset_form == OffsetForm::kUnits ? kUnitBytes : 0);
    span = units_bytes > 0 ? kSpanColumns / w.group : groups;
  }

  int64_t group_bytes() const { return header_bytes + group * block_bytes; }
  // Of the span that a group lies in, and of the group's header, from the panel's beginning.
  int64_t span_at(int64_t g) const { return g / span * (units_bytes + span * group_bytes()); }
  int64_t header_at(int64_t g) const { return span_at(g) + units_bytes + g % span * group_bytes(); }
  // Of a block's codes.
  int64_t block_at(int64_t block) const {
    return header_at(block / group) + header_bytes + block % group * block_bytes;
  }
  int64_t panel_bytes() const { return block_at(blocks - 1) + block_bytes; }

  static constexpr int64_t scale_bytes(ScaleForm form) {
    return form == ScaleForm::kFloat ? 4 : form == ScaleForm::kUnits ? 1 : 2;
  }
  static constexpr int64_t offset_bytes(OffsetForm form) {
    switch (form) {
      case OffsetForm::kNone: return 0;
      case OffsetForm::kZeroPoint: return 1;
      case OffsetForm::kFloat: return 4;
      case OffsetForm::kUnits: return 1;
      default: return 2;
    }
  }

  static constexpr int64_t kUnitBytes = kPanelRows * 2;  // fp16

  int64_t steps, blocks;  // of a block, of the matrix
  int64_t group, groups;  // blocks of a group, and how many there are
  int64_t block_bytes, offsets_at, header_bytes;
  int64_t span, units_bytes, offset_units_at;  // groups of a span, and what it begins with
};

// The activations' sums over each group, which offsets multiply.
inline int64_t stored_groups(const Linear& w) { return StoredLayout(w, 8).groups; }

// Scales and offsets of one group after the other, as floats.
class StoredScales {
 public:
  StoredScales(const Linear& w, const StoredLayout& layout)
      : has_offsets(w.offset_form != OffsetForm::kNone),
        scale_(w.scale_form),
        offset_(w.offset_form),
        offsets_at_(layout.offsets_at),
        offset_units_at_(layout.offset_units_at) {}

  // Of the lanes of vector `v`. `span`: where the group's span begins.
  Vec scale(const char* header, const char* span, int v) const {
    switch (scale_) {
      case ScaleForm::kHalf: return vload_half(halves(header, v));
      case ScaleForm::kBf16: return vload_bf16(halves(header, v));
      case ScaleForm::kFloat: return vload(floats(header, v));
      default: return vmul(vload_bytes(bytes(header, v)), vload_half(halves(span, v)));
    }
  }
  // `scale`: the same lanes'.
  Vec offset(const char* header, const char* span, int v, Vec scale) const {
    const char* at = header + offsets_at_;
    switch (offset_) {
      case OffsetForm::kZeroPoint: return vsub(vzero(), vmul(vload_bytes(bytes(at, v)), scale));
      case OffsetForm::kHalf: return vload_half(halves(at, v));
      case OffsetForm::kBf16: return vload_bf16(halves(at, v));
      case OffsetForm::kFloat: return vload(floats(at, v));
      default: return vmul(vload_bytes(bytes(at, v)), vload_half(halves(span + offset_units_at_, v)));
    }
  }

  const bool has_offsets;

 private:
  static const uint16_t* halves(const char* at, int v) { return reinterpret_cast<const uint16_t*>(at) + v * kLanes; }
  static const float* floats(const char* at, int v) { return reinterpret_cast<const float*>(at) + v * kLanes; }
  static const int8_t* bytes(const char* at, int v) { return reinterpret_cast<const int8_t*>(at) + v * kLanes; }

  const ScaleForm scale_;
  const OffsetForm offset_;
  const int64_t offsets_at_, offset_units_at_;
};

}  // namespace quire
