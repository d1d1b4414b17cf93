// How a VerbsLink is made, and what it says about itself.

#include <algorithm>
#include <utility>

#include "kvxfer/status.h"
#include "transport/common/socket.h"
#include "transport/verbs/verbs_link.h"

namespace kvxfer {

VerbsLink::VerbsLink(IoThreads& threads, UniqueFd socket, VerbsEndpoint::State endpoint,
                     ibv::EndpointAddress remote, const std::vector<ibv::PathChoice>& choices)
    : LinkBase(threads.control(), 1 + choices.size()),
      fabric_(std::move(endpoint.fabric)),
      arena_(std::move(endpoint.arena)),
      source_(std::move(endpoint.source)),
      remote_(std::move(remote)),
      remote_arena_(std::make_shared<ibv::Target>(remote_)),
      reader_(arena_ != nullptr),
      control_description_(local_address(socket.get()) + " - " + peer_address(socket.get())),
      socket_(threads.control(), std::move(socket)) {
  for (const ibv::PathChoice& choice : choices) {
    auto path = std::make_unique<Path>();
    path->index = paths_.size();
    path->loop = threads.bulk(path->index);
    path->rail = reader_ ? choice.reader_rail : choice.writer_rail;
    path->remote_rail = reader_ ? choice.writer_rail : choice.reader_rail;
    const size_t qp = reader_ ? choice.reader_qp : choice.writer_qp;
    const size_t remote_qp = reader_ ? choice.writer_qp : choice.reader_qp;
    const ibv::RailAddress& theirs = remote_.rails[path->remote_rail];
    const size_t gid = reader_ ? choice.gids.first : choice.gids.second;
    const size_t remote_gid = reader_ ? choice.gids.second : choice.gids.first;
    path->gid = fabric_->rails[path->rail].gids[gid];
    path->remote_gid = theirs.gids[remote_gid];
    adopt(*path, std::move(endpoint.qps[path->rail][qp]));
    connect(*path, theirs.qps[remote_qp]);
    path->state = Path::kOpen;
    paths_.push_back(std::move(path));
  }
  weigh_paths();
}

// By what the slower end of each says. Where one says nothing, all count alike.
void VerbsLink::weigh_paths() {
  for (const auto& path : paths_) {
    path->speed = std::min(fabric_->rails[path->rail].mbit_per_second(),
                           remote_.rails[path->remote_rail].mbit_per_second);
  }
  if (std::all_of(paths_.begin(), paths_.end(), [](const auto& path) { return path->speed > 0; }))
    return;
  for (const auto& path : paths_) path->speed = 1;
}

void VerbsLink::adopt(Path& path, std::unique_ptr<ibv::QueuePair> qp) {
  path.qp = std::move(qp);
  path.receives_posted = path.qp->receives();
  path.landed = 0;
  path.watched = path.drain_begun = path.drain_ends = path.marker_seen = false;
  path.asked_to_close = false;
  path.retries = 0;
  path.problem.clear();
  if (!reader_) {
    path.sends.emplace(*path.qp, fabric_->rails[path.rail].nic_index, path.remote_rail, counts_);
  }
}

void VerbsLink::connect(Path& path, const ibv::QpAddress& remote_qp) {
  path.qp->connect(remote_.rails[path.remote_rail], remote_qp, path.gid, path.remote_gid);
}

// What the slower ends of the rails in use say about themselves.
std::optional<double> VerbsLink::rate() const {
  const Lock lock(mutex_);
  double mbit = 0;
  std::vector<bool> counted(fabric_->rails.size());
  for (const auto& path : paths_) {
    if (path->state != Path::kOpen || counted[path->rail]) continue;
    counted[path->rail] = true;
    mbit += std::min(fabric_->rails[path->rail].mbit_per_second(),
                     remote_.rails[path->remote_rail].mbit_per_second);
  }
  if (mbit == 0) return std::nullopt;
  return mbit * 1e6 / 8;
}

std::string VerbsLink::describe() const {
  const Lock lock(mutex_);
  std::vector<bool> used(fabric_->rails.size());
  for (const auto& path : paths_) used[path->rail] = true;
  const auto rails = std::count(used.begin(), used.end(), true);
  std::string text = "verbs, " + std::to_string(rails) + (rails == 1 ? " rail" : " rails") +
                     fabric_->nearness + ", control " + control_description_;
  std::vector<std::pair<std::string, int>> kinds;
  for (const auto& path : paths_) {
    std::string kind =
        fabric_->rails[path->rail].name() + " - " + remote_.rails[path->remote_rail].name +
        " (GID " + std::to_string(path->gid.index) + " " + ibv::gid_text(path->gid) + " - " +
        std::to_string(path->remote_gid.index) + " " + ibv::gid_text(path->remote_gid) + ")";
    if (path->state != Path::kOpen) kind += " lost: " + path->problem;
    const auto known = std::find_if(kinds.begin(), kinds.end(),
                                    [&](const auto& other) { return other.first == kind; });
    if (known == kinds.end()) {
      kinds.emplace_back(std::move(kind), 1);
    } else {
      ++known->second;
    }
  }
  for (const auto& [kind, count] : kinds) {
    text += "; " + kind + ", " + std::to_string(count) + " queue pair" + (count == 1 ? "" : "s");
  }
  if (counts_.failovers > 0) {
    text += "; " + std::to_string(counts_.failovers) + " failover" +
            (counts_.failovers == 1 ? "" : "s, the last") + " from " + last_failover_;
  }
  text += "; " + std::to_string(counts_.work_requests) + " work requests in " +
          std::to_string(counts_.posts) + " posts, " + std::to_string(counts_.completions) +
          " completions, " + std::to_string(counts_.wakeups) + " wake-ups";
  return text;
}

std::shared_ptr<Link> make_verbs_link(IoThreads& threads, int control_fd, VerbsEndpoint endpoint,
                                      std::span<const std::byte> remote) {
  UniqueFd control(control_fd);
  prepare_stream_socket(control.get());
  if (is_tcp_socket(control.get())) prepare_tcp_socket(control.get());
  auto theirs = ibv::EndpointAddress::decode(remote);
  VerbsEndpoint::State& ours = *endpoint.state_;
  const bool reader = ours.arena != nullptr;
  if (reader == (theirs.arena_bytes != 0)) {
    throw Error(StatusCode::kProtocol, reader ? "both sides of a verbs link have an arena"
                                              : "neither side of a verbs link has an arena");
  }
  const auto choices =
      reader ? ibv::choose_paths(ours.address, theirs) : ibv::choose_paths(theirs, ours.address);
  if (choices.empty()) {
    const auto list = [](const ibv::EndpointAddress& side) {
      std::string all;
      for (const ibv::RailAddress& rail : side.rails) {
        all += (all.empty() ? "" : ", ") + rail.name + (rail.ethernet ? "" : " (InfiniBand)");
        for (const ibv::PortGid& gid : rail.gids) all += " " + ibv::gid_text(gid);
      }
      return all;
    };
    throw Error(StatusCode::kUnreachable,
                "no RDMA port of ours (" + list(ours.address) + ours.fabric->nearness +
                    ") reaches one of the peer's (" + list(theirs) +
                    "): they need the same link layer and addresses of one kind; where a side has "
                    "left out ports as farther from its GPUs, verbs_near='any' has it use them");
  }
  return std::make_shared<VerbsLink>(threads, std::move(control), std::move(ours),
                                     std::move(theirs), choices);
}

}  // namespace kvxfer
