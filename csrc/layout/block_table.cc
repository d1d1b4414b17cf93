#include <algorithm>
#include <string>

#include "kvxfer/copy_plan.h"
#include "kvxfer/status.h"

namespace kvxfer {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw Error(StatusCode::kInvalid, what); }

// Appends the end of each block that lies inside (begin, end).
void append_block_ends(uint64_t begin, uint64_t end, uint32_t block_size, uint32_t slot,
                       std::vector<uint32_t>& ends) {
  for (uint64_t at = begin + (block_size - slot); at < end; at += block_size) {
    ends.push_back(static_cast<uint32_t>(at));
  }
}

void check_slot(const char* side, uint32_t block_size, uint32_t slot) {
  if (block_size == 0) refuse(std::string("the ") + side + "'s blocks have 0 tokens");
  if (slot >= block_size) {
    refuse(std::string("the ") + side + "'s first slot is " + std::to_string(slot) +
           ", but its blocks have only " + std::to_string(block_size) + " tokens");
  }
}

}  // namespace

void BlockTable::validate(const CacheLayout& layout, uint32_t begin, uint32_t end,
                          bool unique) const {
  check_slot("cache", layout.block_size, first_slot);
  if (begin >= end) {
    refuse("the token range [" + std::to_string(begin) + ", " + std::to_string(end) + ") is empty");
  }
  if (begin < first_token) {
    refuse("token " + std::to_string(begin) +
           " is asked for, but the block table starts with token " + std::to_string(first_token));
  }
  const uint64_t slots = uint64_t{first_slot} + (end - first_token);
  const uint64_t held = uint64_t{blocks.size()} * layout.block_size;
  if (slots > held) {
    refuse("tokens up to " + std::to_string(end) + " need " +
           std::to_string((slots + layout.block_size - 1) / layout.block_size) + " blocks of " +
           std::to_string(layout.block_size) + " tokens, but the block table has " +
           std::to_string(blocks.size()));
  }
  const auto highest = std::max_element(blocks.begin(), blocks.end());
  if (*highest >= layout.num_blocks) {
    refuse("block " + std::to_string(*highest) + " is out of range; the cache has " +
           std::to_string(layout.num_blocks) + " blocks");
  }
  if (!unique) return;
  std::vector<bool> seen(*highest + size_t{1});
  for (const uint32_t block : blocks) {
    if (seen[block]) {
      refuse("block " + std::to_string(block) + " is named twice; a block can receive only once");
    }
    seen[block] = true;
  }
}

std::vector<uint32_t> tile_ends(uint32_t begin, uint32_t end, uint32_t producer_block_size,
                                uint32_t producer_slot, uint32_t consumer_block_size,
                                uint32_t consumer_slot) {
  check_slot("producer", producer_block_size, producer_slot);
  check_slot("consumer", consumer_block_size, consumer_slot);
  std::vector<uint32_t> ends;
  if (begin >= end) return ends;
  append_block_ends(begin, end, producer_block_size, producer_slot, ends);
  const auto middle = static_cast<std::ptrdiff_t>(ends.size());
  append_block_ends(begin, end, consumer_block_size, consumer_slot, ends);
  std::inplace_merge(ends.begin(), ends.begin() + middle, ends.end());
  ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
  ends.push_back(end);
  return ends;
}

}  // namespace kvxfer
