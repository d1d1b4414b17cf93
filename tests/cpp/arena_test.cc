#include "engine/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "kvxfer/status.h"

namespace kvxfer {
namespace {

constexpr uint32_t kSlot = 64u << 10;

// Runs `action` in a forked child and returns what it printed: limits are per process.
std::string in_child(const std::function<std::string()>& action) {
  int fds[2];
  REQUIRE(::pipe2(fds, O_CLOEXEC) == 0);
  UniqueFd reader(fds[0]);
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    const std::string text = action();
    const ssize_t written = ::write(fds[1], text.data(), text.size());
    ::_exit(written == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  ::close(fds[1]);
  std::string text;
  char buffer[512];
  for (ssize_t got; (got = ::read(reader.get(), buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, static_cast<size_t>(got));
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  return text;
}

TEST_CASE("an arena is cut into slots that lie apart; what is left over is not used") {
  Arena arena(Arena::kShared, 10 * kSlot + 5000, kSlot, false);
  CHECK(arena.num_slots() == 10);
  CHECK(arena.num_free() == 10);
  CHECK(arena.slot_bytes() == kSlot);
  CHECK(arena.bytes() == 10 * kSlot);
  struct stat found;
  REQUIRE(::fstat(arena.fd(), &found) == 0);
  CHECK(static_cast<uint64_t>(found.st_size) == arena.bytes());

  std::set<uint32_t> slots;
  while (const auto slot = arena.take()) {
    slots.insert(*slot);
    std::memset(arena.slot(*slot), static_cast<int>(*slot) + 1, kSlot);
  }
  CHECK(slots.size() == 10);
  CHECK(*slots.begin() == 0);
  CHECK(*slots.rbegin() == 9);
  for (const uint32_t slot : slots) {
    CHECK(arena.slot(slot) == arena.slot(0) + uint64_t{slot} * kSlot);
    const auto right = [&](std::byte value) { return value == std::byte(slot + 1); };
    CHECK(std::all_of(arena.slot(slot), arena.slot(slot) + kSlot, right));
  }
}

TEST_CASE("slots start with the first, and come back most-recently-freed first") {
  Arena arena(Arena::kShared, 4 * kSlot, kSlot, false);
  CHECK(*arena.take() == 0);
  CHECK(*arena.take() == 1);
  CHECK(*arena.take() == 2);
  arena.give_back(0);
  arena.give_back(2);
  CHECK(*arena.take() == 2);
  CHECK(*arena.take() == 0);
  CHECK(*arena.take() == 3);
}

TEST_CASE("a thread gets again the slot that it took last, where that is free") {
  Arena arena(Arena::kPrivate, 4 * kSlot, kSlot, false);
  const auto elsewhere = [&] {
    std::optional<uint32_t> slot;
    std::thread([&] { slot = arena.take_again(); }).join();
    return slot;
  };
  CHECK(*arena.take_again() == 0);
  CHECK(*elsewhere() == 1);
  arena.give_back(0);
  arena.give_back(1);
  CHECK(*arena.take_again() == 0);  // not the one freed last
  CHECK(*arena.take_again() == 1);
  CHECK(*arena.take_again() == 2);
  arena.give_back(1);
  CHECK(*elsewhere() == 1);  // none of its own: the one freed last
  CHECK(*elsewhere() == 3);
  CHECK(!elsewhere());
}

TEST_CASE("an arena that is used up says so, and goes on when a slot comes back") {
  Arena arena(Arena::kShared, 2 * kSlot, kSlot, false);
  CHECK(arena.take());
  CHECK(arena.take());
  CHECK(arena.num_free() == 0);
  CHECK(!arena.take());
  CHECK(!arena.take());
  arena.give_back(1);
  CHECK(arena.num_free() == 1);
  CHECK(*arena.take() == 1);
  CHECK(!arena.take());
}

TEST_CASE("peers can map the arena, and nobody can change its size") {
  Arena arena(Arena::kShared, 2 * kSlot, kSlot, false);
  const int seals = ::fcntl(arena.fd(), F_GET_SEALS);
  REQUIRE(seals >= 0);
  CHECK((seals & F_SEAL_SHRINK) != 0);
  CHECK((seals & F_SEAL_GROW) != 0);
  CHECK((seals & F_SEAL_SEAL) != 0);
  CHECK((seals & F_SEAL_WRITE) == 0);
  CHECK(::ftruncate(arena.fd(), kSlot) != 0);
  CHECK(::ftruncate(arena.fd(), 4 * kSlot) != 0);
  CHECK((::fcntl(arena.fd(), F_GETFD) & FD_CLOEXEC) != 0);

  void* theirs = ::mmap(nullptr, arena.bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd(), 0);
  REQUIRE(theirs != MAP_FAILED);
  std::memset(static_cast<std::byte*>(theirs) + kSlot, 0x5a, kSlot);
  CHECK(arena.slot(1)[0] == std::byte{0x5a});
  CHECK(arena.slot(1)[kSlot - 1] == std::byte{0x5a});
  CHECK(arena.slot(0)[kSlot - 1] == std::byte{0});
  ::munmap(theirs, arena.bytes());
}

TEST_CASE("an arena that does not hold one slot names both sizes and both knobs") {
  try {
    Arena arena(Arena::kShared, kSlot - 1, kSlot, false);
    FAIL("nothing was thrown");
  } catch (const Error& error) {
    const std::string text = error.what();
    CHECK(error.code() == StatusCode::kInvalid);
    CHECK(text.find(std::to_string(kSlot - 1)) != std::string::npos);
    CHECK(text.find(std::to_string(kSlot)) != std::string::npos);
    CHECK(text.find("arena_bytes") != std::string::npos);
    CHECK(text.find("chunk_bytes") != std::string::npos);
  }
}

TEST_CASE("an arena that cannot be locked names the limit and how to raise it") {
  const std::string text = in_child([]() -> std::string {
    const rlimit limit{256u << 10, 256u << 10};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "no limit";
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return "no limit";
    try {
      Arena arena(Arena::kShared, 4u << 20, kSlot, true);
    } catch (const Error& error) {
      return std::string(status_name(error.code())) + ": " + error.what();
    }
    return "no limit";
  });
  if (text == "no limit") {
    MESSAGE("skipped: the limit of locked memory does not hold for this process");
    return;
  }
  CHECK(text.find("NO_RESOURCES: staging arena of 4 MiB: mlock: ") == 0);
  CHECK(text.find("256 KiB") != std::string::npos);
  CHECK(text.find("ulimit -l") != std::string::npos);
  CHECK(text.find("lock_arena") != std::string::npos);
}

TEST_CASE("an arena that can be locked is") {
  const std::string text = in_child([]() -> std::string {
    try {
      Arena arena(Arena::kShared, 2 * kSlot, kSlot, true);
      arena.slot(1)[0] = std::byte{1};
      return "locked";
    } catch (const Error& error) {
      return error.what();
    }
  });
  CHECK((text == "locked" || text.find("mlock") != std::string::npos));
}

TEST_CASE("an arena for which there is no descriptor says so") {
  const std::string text = in_child([]() -> std::string {
    const rlimit none{0, 0};
    if (::setrlimit(RLIMIT_NOFILE, &none) != 0) return "no limit";
    try {
      Arena arena(Arena::kShared, kSlot, kSlot, false);
    } catch (const Error& error) {
      return std::string(status_name(error.code())) + ": " + error.what();
    }
    return "no limit";
  });
  CHECK(text.find("NO_RESOURCES: ") == 0);
  CHECK(text.find("ulimit -n") != std::string::npos);
}

}  // namespace
}  // namespace kvxfer
