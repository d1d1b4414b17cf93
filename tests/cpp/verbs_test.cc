// The verbs transport over any adapters: those of tests/verbs/fake_verbs.h, or real ones when
// KVXFER_TEST_VERBS names them.

#include <dirent.h>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "kvxfer/status.h"
#include "verbs_pair.h"

namespace kvxfer::testing {
namespace {

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

TEST_CASE("verbs: a link says what it is") {
  reset_world();
  VerbsPair pair;
  CHECK(std::string(pair.producer->transport()) == "verbs");
  CHECK(pair.consumer->one_sided());
  CHECK_FALSE(pair.producer->one_sided());
  CHECK(pair.producer->mapped_arena().empty());
  const std::string text = pair.producer->describe();
  CHECK(text.starts_with("verbs"));
  CHECK(text.find(options_for(false).devices[0] + ":1 - " + options_for(true).devices[0] + ":1") !=
        std::string::npos);
  CHECK(text.find("RoCE v2 ::ffff:10.") != std::string::npos);
  const auto rails = pair.consumer_fabric->rails();
  REQUIRE(rails.size() == options_for(true).devices.size());
  CHECK(rails[0].active);
  CHECK(rails[0].link_layer == "Ethernet");
  CHECK(rails[0].mtu >= 1024);
  CHECK_FALSE(rails[0].gids.empty());
}

TEST_CASE("verbs: control messages arrive in order and intact, both ways") {
  reset_world();
  VerbsPair pair;
  std::vector<Bytes> sent;
  std::mt19937 random(7);
  for (uint32_t i = 0; i < times(200); ++i) {
    const size_t size = i < 20 ? i : i % 50 == 0 ? random() % (1u << 20) : random() % 3000;
    sent.push_back(random_bytes(size, i));
  }
  sent.push_back(random_bytes(kMaxMessage, 1));
  sent.push_back(random_bytes(kMaxMessage - 1, 2));
  pair.producer->send(sent[0]);  // before start() it waits
  pair.start();
  std::thread other([&] {
    for (const Bytes& message : sent) pair.consumer->send(message);
  });
  for (size_t i = 1; i < sent.size(); ++i) pair.producer->send(sent[i]);
  other.join();
  CHECK(pair.consumer_sink.wait([&] { return pair.consumer_sink.messages.size() == sent.size(); }));
  CHECK(pair.producer_sink.wait([&] { return pair.producer_sink.messages.size() == sent.size(); }));
  CHECK(pair.consumer_sink.messages == sent);
  CHECK(pair.producer_sink.messages == sent);
}

TEST_CASE("verbs: long messages of several threads do not mix") {
  reset_world();
  VerbsPair pair;
  pair.start();
  const Bytes longest = random_bytes(kMaxMessage, 3);
  std::thread other([&] {
    for (int i = 0; i < 200; ++i) pair.producer->send(to_bytes("short"));
  });
  for (uint32_t i = 0; i < times(4); ++i) pair.producer->send(longest);
  other.join();
  CHECK(pair.consumer_sink.wait(
      [&] { return pair.consumer_sink.messages.size() == 200 + times(4); }));
  for (const Bytes& message : pair.consumer_sink.messages) {
    CHECK((message == to_bytes("short") || message == longest));
  }
}

TEST_CASE("verbs: writes land bit-exactly with their notice, from several threads") {
  reset_world();
  for (const bool registered : {false, true}) {
    VerbsPair pair;
    Traffic traffic(pair, times(1500), 256u << 10);
    if (registered) traffic.register_sources();
    pair.start();
    std::thread other([&] { traffic.run(); });
    CHECK(traffic.run([&](uint32_t id) { pair.producer->send(to_bytes(std::to_string(id))); }));
    other.join();
    CHECK(traffic.wait());
    CHECK(traffic.wrong() == 0);
    CHECK(traffic.repeated() == 0);
    std::set<uint64_t> tokens;
    for (const auto& written : pair.producer_sink.written) {
      CHECK(written.ok);
      tokens.insert(written.token);
    }
    CHECK(tokens.size() == times(1500));
  }
}

TEST_CASE("verbs: writes of nothing, and notices from nothing to the limit") {
  reset_world();
  VerbsPair pair;
  pair.start();
  const Bytes source = random_bytes(100, 5);
  const Bytes longest = random_bytes(kMaxNotice, 6);
  const Bytes large = random_bytes(2u << 20, 7);
  pair.producer->write({}, 0, {}, 1);
  pair.producer->write(source, 8, {}, 2);
  pair.producer->write({}, 0, longest, 3);
  pair.producer->write(source, 200, longest, 4);
  pair.producer->write(large, 1u << 20, longest, 5);
  pair.producer->write(source, pair.arena.size() - source.size(), {}, 6);
  CHECK(pair.wait_landed(6));
  CHECK(pair.wait_written(6));
  CHECK(std::equal(source.begin(), source.end(), pair.arena.data() + 8));
  CHECK(std::equal(source.begin(), source.end(), pair.arena.data() + 200));
  CHECK(std::equal(large.begin(), large.end(), pair.arena.data() + (1u << 20)));
  CHECK(std::equal(source.begin(), source.end(),
                   pair.arena.data() + pair.arena.size() - source.size()));
  std::multiset<size_t> sizes;
  for (const auto& landed : pair.consumer_sink.landed) {
    sizes.insert(landed.notice.size());
    CHECK((landed.notice.empty() || landed.notice == longest));
  }
  CHECK(sizes.count(kMaxNotice) == 3);
  CHECK(pair.consumer_sink.incoming == 0);  // nobody is asked
}

TEST_CASE("verbs: writes over the end of the arena, and others that make no sense, end the link") {
  reset_world();
  const Bytes source = random_bytes(100, 5);
  for (int what = 0; what < 4; ++what) {
    VerbsPair pair;
    pair.start();
    const Bytes notice(what == 2 ? kMaxNotice + 1 : 0);
    auto& link = what == 3 ? pair.consumer : pair.producer;
    auto& sink = what == 3 ? pair.consumer_sink : pair.producer_sink;
    const uint64_t offset = what == 0 ? pair.arena.size() - 99 : what == 1 ? ~uint64_t{0} - 5 : 0;
    link->write(source, offset, notice, 7);
    CHECK(sink.wait_closed());
    REQUIRE(sink.written.size() == 1);
    CHECK_FALSE(sink.written[0].ok);
    CHECK(sink.closed[0].find("write") != std::string::npos);
  }
}

TEST_CASE("verbs: close ends both ends, each exactly once") {
  reset_world();
  for (uint32_t round = 0; round < std::max(times(12), 3u); ++round) {
    VerbsPair pair;
    pair.start();
    if (round % 3 != 1) pair.consumer->close("consumer had enough");
    if (round % 3 != 0) pair.producer->close("producer had enough");
    pair.consumer->close("once more");
    CHECK(pair.producer_sink.wait_closed());
    CHECK(pair.consumer_sink.wait_closed());
    if (round % 3 == 0) CHECK(pair.consumer_sink.closed[0] == "consumer had enough");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(pair.consumer_sink.times_closed() == 1);
    CHECK(pair.producer_sink.times_closed() == 1);
  }
}

TEST_CASE("verbs: close before start is reported by start") {
  reset_world();
  VerbsPair pair;
  pair.producer->close("never mind");
  pair.start();
  CHECK(pair.producer_sink.wait_closed());
  CHECK(pair.producer_sink.closed[0] == "never mind");
  CHECK(pair.consumer_sink.wait_closed());
}

TEST_CASE("verbs: the last words of a peer arrive before its end") {
  reset_world();
  VerbsPair pair;
  pair.start();
  for (int i = 0; i < 50; ++i) pair.producer->send(to_bytes("farewell"));
  pair.producer->close("leaving");
  CHECK(pair.consumer_sink.wait_closed());
  CHECK(pair.consumer_sink.messages.size() == 50);
  CHECK(pair.consumer_sink.closed[0].find("closed") != std::string::npos);
}

TEST_CASE("verbs: nothing is called, and nothing lands, after on_closed while writers go on") {
  reset_world();
  for (uint32_t round = 0; round < std::max(times(8), 2u); ++round) {
    VerbsPair pair;
    std::atomic<bool> consumer_closed{false};
    std::atomic<int> late{0};
    pair.consumer_sink.closed_hook = [&](const std::string&) {
      // What is granted from now on is somebody else's.
      std::fill(pair.arena.data(), pair.arena.data() + pair.arena.size(), std::byte{0x77});
      consumer_closed = true;
    };
    pair.consumer_sink.landed_hook = [&](auto, bool) { late += consumer_closed; };
    pair.start();
    std::atomic<bool> stop{false};
    const Bytes source = random_bytes(100'000, 4);
    const auto memory = pair.producer_fabric->register_memory(
        {const_cast<std::byte*>(source.data()), source.size()}, VerbsAccess::kSource);
    std::atomic<uint64_t> written{0};
    std::thread writer([&, link = pair.producer] {
      for (uint64_t token = 0; !stop && token < 3000; ++token) {
        link->write(source, (token % 80) * source.size(), {}, token);
        ++written;
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(1 + round * 2));
    (round % 2 ? pair.producer : pair.consumer)->close("in the middle");
    CHECK(pair.consumer_sink.wait_closed());
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(std::all_of(pair.arena.data(), pair.arena.data() + pair.arena.size(),
                      [](std::byte byte) { return byte == std::byte{0x77}; }));
    CHECK(pair.producer_sink.wait_closed());
    stop = true;
    writer.join();
    CHECK(late == 0);
    CHECK(pair.producer_sink.written.size() == written);
  }
}

TEST_CASE("verbs: a link may be dropped from inside a call to its sink") {
  reset_world();
  for (const bool on_landed : {false, true}) {
    for (const bool close_first : {false, true}) {
      VerbsPair pair;
      std::atomic<bool> dropped{false};
      const auto drop = [&] {
        if (close_first) pair.consumer->close("from inside");
        pair.consumer.reset();
        dropped = true;
      };
      if (on_landed) {
        pair.consumer_sink.landed_hook = [&](auto, bool) { drop(); };
      } else {
        pair.consumer_sink.message_hook = [&](Link&, auto) { drop(); };
      }
      pair.start();
      const Bytes source = random_bytes(1000, 1);
      if (on_landed) {
        pair.producer->write(source, 0, {}, 1);
      } else {
        pair.producer->send(to_bytes("drop it"));
      }
      CHECK(eventually([&] { return dropped.load(); }));
      CHECK(pair.producer_sink.wait_closed());
      if (close_first) CHECK(pair.consumer_sink.wait_closed());
      pair.started = false;
    }
  }
}

TEST_CASE("verbs: several links share a fabric and its arena") {
  reset_world();
  VerbsPair pair;
  pair.start();
  const auto first_producer = pair.producer, first_consumer = pair.consumer;
  pair.connect();
  Recorder second_producer, second_consumer;
  pair.producer->start(second_producer);
  pair.consumer->start(second_consumer);
  const Bytes a = random_bytes(300'000, 1), b = random_bytes(300'000, 2);
  first_producer->write(a, 0, {}, 1);
  pair.producer->write(b, 1u << 20, {}, 2);
  CHECK(pair.wait_landed(1));
  CHECK(second_consumer.wait([&] { return second_consumer.landed.size() == 1; }));
  CHECK(std::equal(a.begin(), a.end(), pair.arena.data()));
  CHECK(std::equal(b.begin(), b.end(), pair.arena.data() + (1u << 20)));

  // The end of one is none of the other's business.
  first_consumer->close("enough");
  CHECK(pair.consumer_sink.wait_closed());
  CHECK(pair.producer_sink.wait_closed());
  pair.producer->write(a, 2u << 20, {}, 3);
  CHECK(second_consumer.wait([&] { return second_consumer.landed.size() == 2; }));
  pair.producer->close("over");
  CHECK(second_producer.wait_closed());
  CHECK(second_consumer.wait_closed());
  pair.started = false;
}

TEST_CASE("verbs: no descriptor, no thread and no object of the library is left behind") {
  reset_world();
  VerbsPair().start();  // whatever is made once and for all
  const size_t fds = entries_of("/proc/self/fd");
  const size_t threads = entries_of("/proc/self/task");
  const Bytes source(100'000);  // read until the link has ended
  for (int i = 0; i < 5; ++i) {
    VerbsPair pair;
    if (i == 0) continue;  // never started
    pair.start();
    pair.producer->send(to_bytes("x"));
    pair.producer->write(source, 0, {}, 1);
    if (i == 1) {
      pair.producer.reset();  // without close()
      pair.consumer.reset();
      pair.started = false;
    }
  }
  CHECK(entries_of("/proc/self/fd") == fds);
  CHECK(eventually([&] { return entries_of("/proc/self/task") == threads; }));
  if (!real_devices()) CHECK(fake_verbs::objects().total() == 0);
}

}  // namespace
}  // namespace kvxfer::testing
