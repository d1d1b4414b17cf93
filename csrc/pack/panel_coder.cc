#include "pack/panel_coder.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/digest_kernels.h"
#include "codec/up16.h"
#include "kvxfer/status.h"
#include "pack/chunk_header.h"
#include "pack/stream_digest.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(StatusCode::kProtocol, "a coded chunk " + what);
}

template <size_t kBytes>
void copy_elements(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
                   uint32_t count) {
  for (uint32_t i = 0; i < count; ++i)
    std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

void copy_elements(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
                   uint32_t count, size_t bytes) {
  switch (bytes) {
    case 1: return copy_elements<1>(to, to_stride, from, from_stride, count);
    case 2: return copy_elements<2>(to, to_stride, from, from_stride, count);
    default: return copy_elements<4>(to, to_stride, from, from_stride, count);
  }
}

}  // namespace

PanelCoder::PanelCoder(const PanelPlan& plan, uint32_t begin, uint32_t end)
    : plan_(plan),
      begin_(begin),
      end_(end),
      extent_(checked_extent(plan, begin, end)),
      producer_bytes_(element_bytes(plan.format_.producer_element)),
      own_bytes_(element_bytes(plan.element_)),
      cursor_(plan, begin),
      ahead_(plan, begin) {}

PanelPlan::Extent PanelCoder::checked_extent(const PanelPlan& plan, uint32_t begin, uint32_t end) {
  const PanelPlan::Extent extent = plan.extent_of(begin, end);
  if (begin == end) throw Error(StatusCode::kInvalid, "a chunk of no panels is asked for");
  if (plan.chunk_bytes(extent, extent.coded_rows, extent.raw_bytes) > UINT32_MAX) {
    throw Error(StatusCode::kInvalid, "a chunk of panels [" + std::to_string(begin) + ", " +
                                          std::to_string(end) +
                                          ") can be larger than 4 GiB; ask for fewer");
  }
  return extent;
}

bool PanelCoder::scattered() const {
  return cursor_.content_stride() != static_cast<int64_t>(own_bytes_);
}

void PanelCoder::find_rows() {
  if (!scattered()) return cursor_.find_rows(row_);
  cursor_.find_rows(memory_);
  const size_t row_bytes = cursor_.content() * own_bytes_;
  scratch_.resize(std::max(scratch_.size(), cursor_.rows() * row_bytes));
  for (uint32_t i = 0; i < cursor_.rows(); ++i) row_[i] = scratch_.data() + i * row_bytes;
}

void PanelCoder::prefetch_next() {
  ahead_.next();
  const size_t row_bytes = ahead_.content() * own_bytes_;
  if (ahead_.token_stride() == static_cast<int64_t>(row_bytes)) return;
  ahead_.find_rows(memory_);
  for (uint32_t i = 0; i < ahead_.rows(); ++i) {
    for (size_t at = 0; at < row_bytes; at += kStripe) __builtin_prefetch(memory_[i] + at, 0, 2);
  }
}

void PanelCoder::gather_scattered() {
  const auto bytes = static_cast<int64_t>(own_bytes_);
  for (uint32_t i = 0; i < cursor_.rows(); ++i) {
    copy_elements(row_[i], bytes, memory_[i], cursor_.content_stride(), cursor_.content(),
                  own_bytes_);
  }
}

void PanelCoder::scatter_gathered() {
  const auto bytes = static_cast<int64_t>(own_bytes_);
  for (uint32_t i = 0; i < cursor_.rows(); ++i) {
    copy_elements(memory_[i], cursor_.content_stride(), row_[i], bytes, cursor_.content(),
                  own_bytes_);
  }
}

CodedChunk PanelCoder::pack(std::byte* wire, uint64_t seed, bool with_digest, bool stream) {
  if (!plan_.produces_) {
    throw Error(StatusCode::kInvalid, std::string("a cache of ") + element_name(plan_.element_) +
                                          " is asked to pack panels whose format says that the "
                                          "producer's holds " +
                                          element_name(plan_.format_.producer_element) +
                                          "; element type and scales must be the cache's own");
  }
  ChunkWriter out(wire, plan_.header_.size(), with_digest, stream);
  uint32_t first_row = 0;
  for (uint32_t panel = begin_; panel < end_; ++panel, cursor_.next()) {
    if (panel + 1 < end_) prefetch_next();
    find_rows();
    if (scattered()) gather_scattered();
    const uint64_t bytes = cursor_.panel_bytes();
    const RowMask marked = encode_panel(cursor_.encoding(), plan_.element_, row_.data(),
                                        cursor_.rows(), cursor_.content(), out.room(bytes));
    if (marked.any()) add_exceptions(marked, first_row);
    first_row += cursor_.rows();
    out.put(bytes);
  }
  put_exceptions(out);
  const auto exceptions = static_cast<uint32_t>(indices_.size());
  put_header(plan_.header_, {begin_, end_ - begin_, exceptions}, wire);
  const Digest digest = out.finish(seed);
  return {static_cast<uint32_t>(out.bytes()), exceptions, digest};
}

void PanelCoder::add_exceptions(const RowMask& marked, uint32_t first_row) {
  const size_t row_bytes = cursor_.content() * own_bytes_;
  for (uint32_t i = 0; i < cursor_.rows(); ++i) {
    if (!marked[i]) continue;
    indices_.push_back(first_row + i);
    raw_rows_.insert(raw_rows_.end(), row_[i], row_[i] + row_bytes);
  }
}

void PanelCoder::put_exceptions(ChunkWriter& out) const {
  const auto put = [&](const void* from, size_t bytes) {
    if (bytes == 0) return;
    std::byte* room = out.room(up16(bytes));
    std::memcpy(room, from, bytes);
    std::memset(room + bytes, 0, up16(bytes) - bytes);
    out.put(up16(bytes));
  };
  put(indices_.data(), indices_.size() * sizeof(uint32_t));
  put(raw_rows_.data(), raw_rows_.size());
}

DecodedChunk PanelCoder::unpack(const std::byte* wire, uint64_t bytes, uint64_t seed,
                                bool with_digest) {
  const uint64_t header = plan_.header_.size();
  if (bytes < header) {
    refuse("has " + std::to_string(bytes) + " bytes; its header alone takes " +
           std::to_string(header));
  }
  DecodedChunk result;
  result.exceptions = check_header(plan_.header_, {begin_, end_ - begin_, 0}, wire);
  if (result.exceptions > extent_.coded_rows) {
    refuse("has exceptions " + std::to_string(result.exceptions) + "; its panels have " +
           std::to_string(extent_.coded_rows) + " coded rows");
  }
  const uint64_t indices_at = header + extent_.panel_bytes;
  const uint64_t raw_at = indices_at + up16(sizeof(uint32_t) * uint64_t{result.exceptions});
  uint64_t expected = raw_at;
  if (bytes >= raw_at && result.exceptions > 0) {
    expected += up16(read_indices(wire + indices_at, result.exceptions));
  }
  if (bytes != expected) {
    refuse("has " + std::to_string(bytes) + " bytes; its header asks for " +
           (bytes < raw_at ? "at least " : "") + std::to_string(expected));
  }

  StreamDigest digest(wire, header, with_digest);
  const std::byte* raw_row = wire + raw_at;
  uint64_t at = header;
  uint32_t first_row = 0;
  size_t taken = 0;
  for (uint32_t panel = begin_; panel < end_; ++panel, cursor_.next()) {
    find_rows();
    result.loss += decode_panel(cursor_.encoding(), cursor_.conversion(), wire + at, cursor_.rows(),
                                cursor_.content(), row_.data(), raw_rows(taken, first_row));
    result.loss += put_raw_rows(raw_row, taken, first_row);
    if (scattered()) scatter_gathered();
    first_row += cursor_.rows();
    at += cursor_.panel_bytes();
    digest.digest_to(at);
  }
  result.digest = digest.finish(bytes, seed);
  return result;
}

uint64_t PanelCoder::read_indices(const std::byte* wire, uint32_t exceptions) {
  indices_.resize(exceptions);
  std::memcpy(indices_.data(), wire, exceptions * sizeof(uint32_t));
  PanelCursor cursor(plan_, begin_);
  uint32_t panel = begin_;
  uint64_t first_row = 0, raw_bytes = 0;
  for (size_t i = 0; i < indices_.size(); ++i) {
    const uint32_t index = indices_[i];
    if (i > 0 && index <= indices_[i - 1]) {
      refuse("names raw row " + std::to_string(index) + " behind row " +
             std::to_string(indices_[i - 1]) + "; indices ascend");
    }
    while (panel < end_ && index >= first_row + cursor.rows()) {
      first_row += cursor.rows();
      if (++panel < end_) cursor.next();
    }
    if (panel == end_) {
      refuse("names raw row " + std::to_string(index) + "; it has " + std::to_string(first_row) +
             " rows");
    }
    if (!cursor.coded()) {
      refuse("names raw row " + std::to_string(index) + ", whose panel is raw as a whole");
    }
    raw_bytes += cursor.content() * producer_bytes_;
  }
  return raw_bytes;
}

RowMask PanelCoder::raw_rows(size_t taken, uint32_t first_row) const {
  RowMask rows;
  for (; taken < indices_.size() && indices_[taken] - first_row < cursor_.rows(); ++taken) {
    rows.set(indices_[taken] - first_row);
  }
  return rows;
}

Loss PanelCoder::put_raw_rows(const std::byte*& source, size_t& taken, uint32_t first_row) {
  Loss loss;
  for (; taken < indices_.size() && indices_[taken] - first_row < cursor_.rows(); ++taken) {
    loss +=
        cursor_.conversion().convert(source, cursor_.content(), row_[indices_[taken] - first_row]);
    source += cursor_.content() * producer_bytes_;
  }
  return loss;
}

CodedChunk pack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end, std::byte* wire,
                       uint64_t seed, bool with_digest, bool stream) {
  return PanelCoder(plan, begin, end).pack(wire, seed, with_digest, stream);
}

DecodedChunk unpack_panels(const PanelPlan& plan, uint32_t begin, uint32_t end,
                           const std::byte* wire, uint64_t bytes, uint64_t seed, bool with_digest) {
  return PanelCoder(plan, begin, end).unpack(wire, bytes, seed, with_digest);
}

}  // namespace kvxfer
