#ifndef KVXFER_ENGINE_FAIR_QUEUE_H_
#define KVXFER_ENGINE_FAIR_QUEUE_H_

#include <deque>
#include <map>
#include <optional>
#include <utility>

namespace kvxfer {

// Items of several owners, who take turns: one that queues thousands does not hold up the others.
template <typename Owner, typename Item>
class FairQueue {
 public:
  bool empty() const { return turns_.empty(); }

  void push(Owner owner, Item item) {
    auto& items = items_[owner];
    if (items.empty()) turns_.push_back(owner);
    items.push_back(std::move(item));
  }

  // The first item of the next owner in turn for whom `may` is true; nothing when there is none.
  template <typename May>
  std::optional<Item> pop(const May& may) {
    for (size_t left = turns_.size(); left > 0; --left) {
      const Owner owner = turns_.front();
      turns_.pop_front();
      if (!may(owner)) {
        turns_.push_back(owner);
        continue;
      }
      const auto found = items_.find(owner);
      Item item = std::move(found->second.front());
      found->second.pop_front();
      if (found->second.empty()) {
        items_.erase(found);
      } else {
        turns_.push_back(owner);
      }
      return item;
    }
    return std::nullopt;
  }

  void clear() {
    turns_.clear();
    items_.clear();
  }

 private:
  std::deque<Owner> turns_;  // those who have items, each once
  std::map<Owner, std::deque<Item>> items_;
};

}  // namespace kvxfer

#endif  // KVXFER_ENGINE_FAIR_QUEUE_H_
