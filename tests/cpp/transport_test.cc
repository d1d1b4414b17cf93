#include <dirent.h>
#include <sys/wait.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <set>
#include <thread>

#include "fork_support.h"
#include "kvxfer/status.h"
#include "link_pair.h"

namespace kvxfer::testing {
namespace {

Bytes random_bytes(size_t size, uint32_t seed) {
  Bytes bytes(size);
  uint32_t state = seed * 2654435761u + 1;
  for (auto& byte : bytes) {
    state = state * 1664525u + 1013904223u;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

size_t entries_of(const char* directory) {
  size_t count = 0;
  DIR* dir = ::opendir(directory);
  while (::readdir(dir)) ++count;
  ::closedir(dir);
  return count;
}

bool eventually(const std::function<bool()>& condition) {
  for (int i = 0; i < 2000; ++i) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

template <typename Test>
void for_each_transport(Test test) {
  for (const std::string& name : transports()) {
    CAPTURE(name);
    test(name);
  }
}

TEST_CASE("links say what they are") {
  for_each_transport([](const std::string& name) {
    LinkPair pair(name);
    CHECK(std::string(pair.producer->transport()) == kind_of(name));
    CHECK(pair.producer->describe().starts_with(pair.producer->transport()));
    CHECK(pair.consumer->one_sided() == (name == "shm" || name == "verbs" || name == "ucx-rc"));
    CHECK_FALSE(pair.producer->one_sided());
    CHECK(pair.producer->mapped_arena().size() == (name == "shm" ? pair.arena.size() : 0));
    CHECK(pair.consumer->mapped_arena().empty());
  });
}

TEST_CASE("control messages arrive in order and intact, both ways") {
  for_each_transport([](const std::string& name) {
    LinkPair pair(name);
    std::vector<Bytes> sent;
    std::mt19937 random(7);
    for (uint32_t i = 0; i < 300; ++i) {
      const size_t size = i < 20 ? i : i % 50 == 0 ? random() % (1u << 20) : random() % 3000;
      sent.push_back(random_bytes(size, i));
    }
    sent.push_back(random_bytes(kMaxMessage, 1));
    pair.producer->send(sent[0]);  // before start() it waits
    pair.start();
    std::thread other([&] {
      for (const Bytes& message : sent) pair.consumer->send(message);
    });
    for (size_t i = 1; i < sent.size(); ++i) pair.producer->send(sent[i]);
    other.join();
    CHECK(
        pair.consumer_sink.wait([&] { return pair.consumer_sink.messages.size() == sent.size(); }));
    CHECK(
        pair.producer_sink.wait([&] { return pair.producer_sink.messages.size() == sent.size(); }));
    CHECK(pair.consumer_sink.messages == sent);
    CHECK(pair.producer_sink.messages == sent);
  });
}

TEST_CASE("writes land bit-exactly with their notice, next to control messages") {
  for_each_transport([](const std::string& name) {
    if (name == "shm") return;
    LinkPair pair(name);
    constexpr uint32_t kSlots = 32;
    constexpr size_t kSlot = 256u << 10;
    constexpr uint32_t kWrites = 2000;
    constexpr uint32_t kWriters = 2;

    const Bytes pattern = random_bytes(kSlot + kWrites, 11);  // each write has its own part

    // A slot is written again only when its last bytes were checked, as an engine does it.
    std::mutex mutex;
    std::condition_variable freed;
    std::vector<uint32_t> free_slots;
    for (uint32_t i = 0; i < kSlots; ++i) free_slots.push_back(i);
    std::atomic<uint32_t> wrong{0}, right{0};
    struct Notice {
      uint32_t id, slot, size;
    };
    pair.consumer_sink.landed_hook = [&](std::span<const std::byte> bytes, bool accepted) {
      Notice notice;
      REQUIRE(bytes.size() >= sizeof(notice));
      std::memcpy(&notice, bytes.data(), sizeof(notice));
      const bool same =
          accepted && std::memcmp(pattern.data() + notice.id,
                                  pair.arena.data() + notice.slot * kSlot, notice.size) == 0;
      ++(same ? right : wrong);
      const std::lock_guard lock(mutex);
      free_slots.push_back(notice.slot);
      freed.notify_one();
    };
    pair.start();

    std::atomic<uint32_t> next{0};
    const auto writer = [&] {
      std::mt19937 random(3);
      for (uint32_t id; (id = next++) < kWrites;) {
        Notice notice{id, 0,
                      static_cast<uint32_t>(id % 7 == 0 ? random() % 100 : random() % kSlot)};
        {
          std::unique_lock lock(mutex);
          if (!freed.wait_for(lock, std::chrono::seconds(10),
                              [&] { return !free_slots.empty(); })) {
            return;
          }
          notice.slot = free_slots.back();
          free_slots.pop_back();
        }
        Bytes bytes(sizeof(notice) + id % 40);
        std::memcpy(bytes.data(), &notice, sizeof(notice));
        pair.producer->write({pattern.data() + id, notice.size}, notice.slot * kSlot, bytes, id);
        pair.producer->send(to_bytes(std::to_string(id)));
      }
    };
    std::vector<std::thread> writers;
    for (uint32_t i = 0; i < kWriters; ++i) writers.emplace_back(writer);
    for (auto& thread : writers) thread.join();

    CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.landed.size() == kWrites; }));
    CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.messages.size() == kWrites; }));
    CHECK(pair.producer_sink.wait([&] { return pair.producer_sink.written.size() == kWrites; }));
    CHECK(wrong == 0);
    CHECK(right == kWrites);
    std::set<uint64_t> tokens;
    for (const auto& written : pair.producer_sink.written) {
      CHECK(written.ok);
      tokens.insert(written.token);
    }
    CHECK(tokens.size() == kWrites);
  });
}

TEST_CASE("bytes written into a mapped arena are there before the message that announces them") {
  LinkPair pair("shm");
  std::atomic<int> wrong{0};
  pair.consumer_sink.message_hook = [&](Link&, std::span<const std::byte> message) {
    uint32_t id;
    std::memcpy(&id, message.data(), sizeof(id));
    const Bytes expected = random_bytes(5000, id);
    if (!std::equal(expected.begin(), expected.end(), pair.arena.data() + (id % 64) * 8192))
      ++wrong;
  };
  pair.start();
  for (uint32_t id = 0; id < 64; ++id) {
    const Bytes bytes = random_bytes(5000, id);
    std::copy(bytes.begin(), bytes.end(), pair.producer->mapped_arena().data() + (id % 64) * 8192);
    Bytes message(sizeof(id));
    std::memcpy(message.data(), &id, sizeof(id));
    pair.producer->send(message);
  }
  CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.messages.size() == 64; }));
  CHECK(wrong == 0);

  const Bytes source(10);
  pair.producer->write(source, 0, {}, 77);
  REQUIRE(pair.producer_sink.written.size() == 1);
  CHECK(pair.producer_sink.written[0].token == 77);
  CHECK_FALSE(pair.producer_sink.written[0].ok);
}

TEST_CASE("writes of nothing, and notices from nothing to the limit") {
  for_each_transport([](const std::string& name) {
    if (name == "shm") return;
    LinkPair pair(name);
    pair.start();
    const Bytes source = random_bytes(100, 5);
    const Bytes longest = random_bytes(kMaxNotice, 6);
    pair.producer->write({}, 0, {}, 1);
    pair.producer->write(source, 8, {}, 2);
    pair.producer->write({}, 0, longest, 3);
    pair.producer->write(source, 200, longest, 4);
    CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.landed.size() == 4; }));
    CHECK(std::equal(source.begin(), source.end(), pair.arena.data() + 8));
    CHECK(std::equal(source.begin(), source.end(), pair.arena.data() + 200));
    const auto count =
        std::count_if(pair.consumer_sink.landed.begin(), pair.consumer_sink.landed.end(),
                      [&](const auto& landed) { return landed.notice == longest; });
    CHECK(count == 2);
  });
}

TEST_CASE("refused writes touch nothing and leave the stream in step") {
  for_each_transport([](const std::string& name) {
    if (name == "shm" || name == "verbs") return;  // nobody asks there
    LinkPair pair(name);
    std::memset(pair.arena.data(), 0x5a, pair.arena.size());
    pair.consumer_sink.incoming_hook = [&](uint64_t offset, uint64_t, auto notice) -> std::byte* {
      return notice[0] == std::byte{1} ? pair.arena.data() + offset : nullptr;
    };
    pair.start();
    const Bytes source = random_bytes(100'000, 9);
    constexpr size_t kRefused = 6u << 20;  // where the refused ones aim, behind the others
    for (uint32_t i = 0; i < 100; ++i) {
      const Bytes notice(1, static_cast<std::byte>(i % 2));
      pair.producer->write(source, i % 2 ? i / 2 * source.size() : kRefused, notice, i);
    }
    CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.landed.size() == 100; }));
    for (const auto& landed : pair.consumer_sink.landed) {
      CHECK(landed.accepted == (landed.notice[0] == std::byte{1}));
    }
    for (size_t i = 0; i < 50; ++i) {
      CHECK(std::equal(source.begin(), source.end(), pair.arena.data() + i * source.size()));
    }
    CHECK(std::all_of(pair.arena.data() + kRefused, pair.arena.data() + pair.arena.size(),
                      [](std::byte byte) { return byte == std::byte{0x5a}; }));
  });
}

TEST_CASE("close ends both ends, each exactly once") {
  for_each_transport([](const std::string& name) {
    for (int round = 0; round < 20; ++round) {
      LinkPair pair(name);
      pair.start();
      if (round % 3 != 1) pair.consumer->close("consumer had enough");
      if (round % 3 != 0) pair.producer->close("producer had enough");
      pair.consumer->close("once more");
      CHECK(pair.producer_sink.wait_closed());
      pair.producer.reset();  // what the engine does when its last job is done
      CHECK(pair.consumer_sink.wait_closed());
      if (round % 3 == 0) CHECK(pair.consumer_sink.closed[0] == "consumer had enough");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(pair.consumer_sink.times_closed() == 1);
      CHECK(pair.producer_sink.times_closed() == 1);
    }
  });
}

TEST_CASE("close before start is reported by start") {
  for_each_transport([](const std::string& name) {
    LinkPair pair(name);
    pair.producer->close("never mind");
    pair.start();
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.producer_sink.closed[0] == "never mind");
    pair.producer.reset();
    CHECK(pair.consumer_sink.wait_closed());
  });
}

TEST_CASE("the last words of a peer arrive before its end") {
  for_each_transport([](const std::string& name) {
    LinkPair pair(name);
    pair.start();
    for (int i = 0; i < 50; ++i) pair.producer->send(to_bytes("farewell"));
    pair.producer->close("leaving");
    pair.producer.reset();
    CHECK(pair.consumer_sink.wait_closed());
    CHECK(pair.consumer_sink.messages.size() == 50);
    CHECK(pair.consumer_sink.closed[0].find("closed") != std::string::npos);
  });
}

TEST_CASE("writes that wait when the link ends are answered before on_closed") {
  for (const std::string name : {"tcp", "tcp-1"}) {
    CAPTURE(name);
    LinkPair pair(name);
    std::atomic<bool> go{false};
    pair.consumer_sink.landed_hook = [&](auto, bool) {
      while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    pair.consumer_sink.incoming_hook = [](uint64_t, uint64_t, auto) { return nullptr; };
    size_t written_at_close = 0;
    pair.producer_sink.closed_hook = [&](const std::string&) {
      written_at_close = pair.producer_sink.written.size();
    };
    pair.start();
    const Bytes source = random_bytes(8u << 20, 2);
    for (uint64_t token = 0; token < 20; ++token) pair.producer->write(source, 0, {}, token);
    pair.consumer->close("the consumer dies");
    go = true;
    CHECK(pair.producer_sink.wait_closed());
    CHECK(written_at_close == 20);
    std::set<uint64_t> tokens;
    for (const auto& written : pair.producer_sink.written) tokens.insert(written.token);
    CHECK(tokens.size() == 20);
    CHECK_FALSE(pair.producer_sink.written.back().ok);

    pair.producer->write(source, 0, {}, 99);
    CHECK(pair.producer_sink.written.back().token == 99);
    CHECK_FALSE(pair.producer_sink.written.back().ok);
  }
}

TEST_CASE("nothing is called after on_closed while writers go on") {
  for_each_transport([](const std::string& name) {
    if (name == "shm") return;
    for (int round = 0; round < 10; ++round) {
      LinkPair pair(name);
      std::atomic<bool> consumer_closed{false};
      std::atomic<int> late{0};
      pair.consumer_sink.incoming_hook = [](uint64_t, uint64_t size, auto) {
        // Streams write at the same time; those of one thread do not.
        thread_local Bytes memory;
        memory.resize(size);
        return memory.data();
      };
      pair.consumer_sink.closed_hook = [&](const std::string&) { consumer_closed = true; };
      pair.consumer_sink.landed_hook = [&](auto, bool) { late += consumer_closed; };
      pair.start();
      std::atomic<bool> stop{false};
      const Bytes source = random_bytes(100'000, 4);
      std::thread writer([&, link = pair.producer] {
        for (uint64_t token = 0; !stop && token < 3000; ++token) {
          link->write(source, 0, {}, token);
          link->send(source);
        }
      });
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      (round % 2 ? pair.producer : pair.consumer)->close("in the middle");
      CHECK(pair.consumer_sink.wait_closed());
      CHECK(pair.producer_sink.wait_closed());
      stop = true;
      writer.join();
      CHECK(late == 0);
    }
  });
}

TEST_CASE("the consumer's fence on shared memory waits for the last writer") {
  LinkPair pair("shm");
  pair.start();
  std::shared_ptr<Link> job = pair.producer;  // a pack in progress
  pair.producer->close("the engine is done with it");
  pair.producer.reset();
  pair.consumer->close("and so is the consumer");
  CHECK(pair.producer_sink.wait_closed());
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  CHECK(pair.consumer_sink.times_closed() == 0);
  job->mapped_arena()[17] = std::byte{3};
  job.reset();
  CHECK(pair.consumer_sink.wait_closed());
  CHECK(pair.arena.data()[17] == std::byte{3});
}

TEST_CASE("a link may be dropped from inside a call to its sink") {
  for_each_transport([](const std::string& name) {
    for (const bool close_first : {false, true}) {
      LinkPair pair(name);
      std::atomic<bool> dropped{false};
      const auto drop = [&] {
        if (close_first) pair.consumer->close("from inside");
        pair.consumer.reset();
        dropped = true;
      };
      pair.consumer_sink.message_hook = [&](Link&, auto) { drop(); };
      pair.start();
      pair.producer->send(to_bytes("drop it"));
      CHECK(eventually([&] { return dropped.load(); }));
      CHECK(pair.producer_sink.wait_closed());
      pair.producer.reset();
      if (close_first) CHECK(pair.consumer_sink.wait_closed());
      pair.started = false;
    }
  });
}

TEST_CASE("a link may be dropped from inside on_landed, on a data thread") {
  for_each_transport([](const std::string& name) {
    if (name == "shm") return;
    LinkPair pair(name);
    std::atomic<bool> dropped{false};
    pair.consumer_sink.landed_hook = [&](auto, bool) {
      pair.consumer.reset();
      dropped = true;
    };
    pair.start();
    const Bytes source = random_bytes(1000, 1);
    pair.producer->write(source, 0, {}, 1);
    CHECK(eventually([&] { return dropped.load(); }));
    CHECK(pair.producer_sink.wait_closed());
    pair.started = false;
  });
}

TEST_CASE("a peer that does not speak the protocol ends the link, with a reason") {
  const auto garbage = random_bytes(4096, 8);
  SUBCASE("control of shm") {
    IoThreads threads(1);
    Recorder sink;
    const auto [ours, theirs] = unix_pair();
    auto link = make_shm_link(threads, ours, -1, 0);
    link->start(sink);
    const uint32_t length = kMaxMessage + 1;
    REQUIRE(::send(theirs, &length, sizeof(length), 0) == sizeof(length));
    ::shutdown(theirs, SHUT_WR);
    CHECK(sink.wait_closed());
    CHECK(sink.closed[0].find("protocol") != std::string::npos);
    ::close(theirs);
  }
  SUBCASE("control of tcp") {
    IoThreads threads(1);
    Recorder sink;
    const auto [ours, theirs] = tcp_pair(false);
    const auto [data, their_data] = tcp_pair(false);
    auto link = make_tcp_link(threads, ours, {data});
    link->start(sink);
    REQUIRE(::send(theirs, garbage.data(), garbage.size(), 0) == 4096);
    CHECK(sink.wait_closed());
    CHECK(sink.closed[0].find("protocol") != std::string::npos);
    ::close(theirs);
    ::close(their_data);
  }
  SUBCASE("data of tcp") {
    IoThreads threads(1);
    Recorder sink;
    const auto [ours, theirs] = tcp_pair(false);
    const auto [data, their_data] = tcp_pair(false);
    auto link = make_tcp_link(threads, ours, {data});
    link->start(sink);
    REQUIRE(::send(their_data, garbage.data(), garbage.size(), 0) == 4096);
    CHECK(sink.wait_closed());
    CHECK(sink.closed[0].find("protocol") != std::string::npos);
    CHECK(sink.incoming == 0);
    ::close(theirs);
    ::close(their_data);
  }
}

TEST_CASE("a peer that never reads control messages ends the link, with a reason") {
  for (const bool tcp : {false, true}) {
    IoThreads threads(1);
    Recorder sink;
    const auto [ours, theirs] = tcp ? tcp_pair(false) : unix_pair();
    const auto [data, their_data] = tcp_pair(false);
    auto link = tcp ? make_tcp_link(threads, ours, {data}) : make_shm_link(threads, ours, -1, 0);
    if (!tcp) ::close(data);
    link->start(sink);
    const Bytes message(kMaxMessage);
    for (int i = 0; i < 40; ++i) link->send(message);
    ::close(their_data);
    if (!tcp) ::close(theirs);
    CHECK(sink.wait_closed());
    if (tcp) ::close(theirs);
    CHECK(sink.closed[0].find("does not read") != std::string::npos);
  }
}

TEST_CASE("a write that was cut off is not delivered") {
  IoThreads threads(1);
  Recorder sink;
  Bytes memory(1000);
  sink.incoming_hook = [&](uint64_t, uint64_t, auto) { return memory.data(); };
  const auto [ours, theirs] = tcp_pair(false);
  const auto [data, their_data] = tcp_pair(false);
  auto link = make_tcp_link(threads, ours, {data});
  link->start(sink);
  // Magic, length of the notice, size, offset, then 400 of 1000 bytes.
  Bytes frame(24 + 400);
  std::memcpy(frame.data(), "KVXW", 4);
  frame[8] = std::byte{1000 & 0xff};
  frame[9] = std::byte{1000 >> 8};
  REQUIRE(::send(their_data, frame.data(), frame.size(), 0) == 424);
  CHECK(sink.wait([&] { return sink.incoming == 1; }));
  ::close(their_data);
  CHECK(sink.wait_closed());
  CHECK(sink.landed.empty());
  CHECK(sink.closed[0].find("data stream") != std::string::npos);
  ::close(theirs);
}

TEST_CASE("arenas that could kill us, and sockets that are none, are refused") {
  IoThreads threads(1);
  const size_t before = entries_of("/proc/self/fd");
  const auto refuse_arena = [&](Arena& arena, uint64_t bytes) {
    const auto [ours, theirs] = unix_pair();
    CHECK_THROWS_AS(make_shm_link(threads, ours, arena.duplicate(), bytes), Error);
    ::close(theirs);
  };
  {
    Arena sealed(1u << 20), unsealed(1u << 20, false);
    refuse_arena(unsealed, 1u << 20);
    refuse_arena(sealed, (1u << 20) + 1);
    refuse_arena(sealed, 0);
  }
  const auto [a, b] = unix_pair();
  const auto [c, d] = tcp_pair(false);
  CHECK_THROWS_AS(make_tcp_link(threads, a, {c}), Error);
  CHECK_THROWS_AS(make_tcp_link(threads, d, {}), Error);
  CHECK_THROWS_AS(make_shm_link(threads, -1, -1, 0), Error);
  ::close(b);
  CHECK(entries_of("/proc/self/fd") == before);
}

TEST_CASE("no descriptor and no thread is left behind") {
  for_each_transport([](const std::string& name) {
    LinkPair(name).start();  // whatever is made once and for all
  });
  const size_t fds = entries_of("/proc/self/fd");
  const size_t threads = entries_of("/proc/self/task");
  for_each_transport([](const std::string& name) {
    for (int i = 0; i < 5; ++i) {
      const Bytes source(100'000);  // outlives the links, which may read it until they have ended
      LinkPair pair(name);
      if (i == 0) continue;  // never started
      pair.start();
      pair.producer->send(to_bytes("x"));
      if (name != "shm") pair.producer->write(source, 0, {}, 1);
      if (i == 1) {
        pair.producer.reset();  // without close()
        pair.consumer.reset();
        pair.started = false;
      }
    }
  });
  CHECK(entries_of("/proc/self/fd") == fds);
  CHECK(eventually([&] { return entries_of("/proc/self/task") == threads; }));
}

TEST_CASE("the death of a process is noticed at once, though it had forked" *
          doctest::skip(!kCanForkThreads)) {
  for (const std::string name : {"shm", "tcp"}) {
    CAPTURE(name);
    Arena arena(1u << 20);
    const auto [ours, theirs] = name == "shm" ? unix_pair() : tcp_pair(false);
    const auto [data, their_data] = tcp_pair(false);
    int pids[2];
    REQUIRE(::pipe(pids) == 0);

    const pid_t peer = ::fork();
    if (peer == 0) {
      ::close(ours);
      ::close(data);
      IoThreads threads(1);
      Recorder sink;
      auto link = name == "shm" ? make_shm_link(threads, theirs, arena.duplicate(), arena.size())
                                : make_tcp_link(threads, theirs, {their_data});
      link->start(sink);
      link->send(to_bytes("up"));
      const pid_t grandchild = ::fork();
      if (grandchild == 0) {
        // Uses the inherited objects, as Python's garbage collector would.
        link->send(to_bytes("from the grave"));
        link.reset();
        ::sleep(20);
        ::_exit(0);
      }
      static_cast<void>(!::write(pids[1], &grandchild, sizeof(grandchild)));
      ::sleep(20);
      ::_exit(0);
    }
    ::close(theirs);
    ::close(their_data);
    ::close(pids[1]);
    IoThreads threads(1);
    Recorder sink;
    auto link =
        name == "shm" ? make_shm_link(threads, ours, -1, 0) : make_tcp_link(threads, ours, {data});
    if (name == "shm") ::close(data);
    link->start(sink);
    pid_t grandchild = 0;
    REQUIRE(::read(pids[0], &grandchild, sizeof(grandchild)) == sizeof(grandchild));
    CHECK(sink.wait([&] { return !sink.messages.empty(); }));
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::kill(peer, SIGKILL);
    const auto start = std::chrono::steady_clock::now();
    CHECK(sink.wait_closed());
    CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(2));
    CHECK(sink.times_closed() == 1);
    CHECK(sink.messages.size() == 1);
    ::kill(grandchild, SIGKILL);
    ::waitpid(peer, nullptr, 0);
    ::close(pids[0]);
  }
}

}  // namespace
}  // namespace kvxfer::testing
