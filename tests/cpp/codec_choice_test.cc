// Which scheme a codec has for which plane, and what `auto` chooses.

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "engine/codec_choice.h"
#include "engine/codecs.h"

namespace kvxfer {
namespace {

constexpr double kGiga = 1e9;

Pipeline pipeline(double link, double coder) {
  Pipeline made;
  made.link = link * kGiga;
  made.rates = {10 * kGiga, 10 * kGiga, coder * kGiga, coder * kGiga};
  made.bytes = 1 * kGiga;
  made.coded_bytes = 0.51 * kGiga;
  return made;
}

TEST_CASE("codec choice: coding pays where the link is slower than the codec") {
  const auto codec = [](double link, double coder) {
    return choose_codec(pipeline(link, coder)).codec;
  };
  CHECK(codec(1.25, 4) == kRecommended);   // 10 Gbit/s
  CHECK(codec(2, 2.3) == kRecommended);    // coded in 0.43 s, raw in 0.5
  CHECK(codec(2, 2.1) == Codec::kRaw);     // not by a tenth
  CHECK(codec(25, 4) == Codec::kRaw);      // 200 Gbit/s
  CHECK(codec(25, 10) == Codec::kRaw);     // copying is the limit, not the link
  CHECK(codec(0.1, 0.05) == Codec::kRaw);  // a codec slower than the link
}

TEST_CASE("codec choice: what is not known sets no limit, but for the link") {
  Pipeline unknown = pipeline(1.25, 4);
  unknown.rates.unpack = unknown.rates.decode = 0;
  CHECK(choose_codec(unknown).codec == kRecommended);
  unknown.link.reset();
  const CodecChoice choice = choose_codec(unknown);
  CHECK(choice.codec == Codec::kRaw);
  CHECK(choice.why.find("not known") != std::string::npos);
}

TEST_CASE("codec choice: the reason has the numbers") {
  const CodecChoice pays = choose_codec(pipeline(1.25, 4));
  for (const std::string part :
       {"1.25 GB/s", "int8 encodes at 4 GB/s", "800 ms in raw", "408 ms in int8"}) {
    CHECK_MESSAGE(pays.why.find(part) != std::string::npos, pays.why);
  }
  CHECK(pays.why.find("does not pay") == std::string::npos);
  CHECK(choose_codec(pipeline(25, 4)).why.find("does not pay") != std::string::npos);
}

TEST_CASE("codec choice: this machine's rates are measured once") {
  const CodecRates& rates = codec_rates();
  for (const double rate : {rates.pack, rates.unpack, rates.encode, rates.decode}) {
    CHECK(rate > 1e6);
    CHECK(rate < 1e13);
  }
  CHECK(&codec_rates() == &rates);
}

TEST_CASE("codecs: int8 takes keys by channel, and wide rows get groups") {
  const std::vector<PlaneSpec> planes = {{"k", 128}, {"v", 256}, {"kv", 576}};
  const auto encodings = encodings_of(Codec::kInt8, planes, 0, ScaleFormat::kFloat32);
  CHECK(encodings[0] == Encoding{Scheme::kInt8Channel, ScaleFormat::kFloat32, 0});
  CHECK(encodings[1] == Encoding{Scheme::kInt8, ScaleFormat::kFloat32, 0});
  CHECK(encodings[2] == Encoding{Scheme::kInt8, ScaleFormat::kFloat32, 128});
  const auto grouped = encodings_of(Codec::kFloat8E4M3, planes, 200, ScaleFormat::kE8M0);
  CHECK(grouped[0] == Encoding{Scheme::kFloat8E4M3, ScaleFormat::kE8M0, 0});
  CHECK(grouped[1] == Encoding{Scheme::kFloat8E4M3, ScaleFormat::kE8M0, 200});
  CHECK(encodings_of(Codec::kRaw, planes, 5, ScaleFormat::kE8M0)[2].scheme == Scheme::kRaw);
  CHECK(encodings_of(Codec::kAuto, planes, 0, ScaleFormat::kFloat32) == encodings);
}

TEST_CASE("codecs: each needs some schemes, and has a name") {
  CHECK(schemes_of(Codec::kRaw) == 0b00001);
  CHECK(schemes_of(Codec::kFloat8E4M3) == 0b00010);
  CHECK(schemes_of(Codec::kFloat8E5M2) == 0b00100);
  CHECK(schemes_of(Codec::kInt8) == 0b11000);
  CHECK(kSchemesHere == 0b11111);
  CHECK(scheme_list(0b10001) == "raw, int8_channel");
  CHECK(scheme_list(0) == "none");
  for (const Codec codec :
       {Codec::kRaw, Codec::kFloat8E4M3, Codec::kFloat8E5M2, Codec::kInt8, Codec::kAuto}) {
    CHECK(codec_from_name(codec_name(codec)) == codec);
  }
  CHECK(std::string(codec_name(static_cast<Codec>(4))) == "unknown");
  CHECK_THROWS_AS(codec_from_name("unknown"), Error);
}

TEST_CASE("codecs: what makes no sense is refused before anything is sent") {
  const std::vector<PlaneSpec> planes = {{"k", 128}};
  const auto refused = [&](CodecSpec spec) {
    try {
      check_codec(spec, planes);
    } catch (const Error& error) {
      return error.code() == StatusCode::kInvalid;
    }
    return false;
  };
  CHECK_FALSE(refused({}));
  CHECK_FALSE(refused({Codec::kAuto, 256, 65535, ScaleFormat::kFloat32, 4, 4}));
  CHECK(refused({static_cast<Codec>(9)}));
  CHECK(refused({Codec::kInt8, 0}));
  CHECK(refused({Codec::kInt8, 257}));
  CHECK(refused({Codec::kInt8, 64, 65536}));
  CHECK(refused({Codec::kInt8, 64, 0, ScaleFormat::kE8M0}));
  CHECK(refused({Codec::kFloat8E4M3, 64, 0, static_cast<ScaleFormat>(3)}));
  CHECK(refused({Codec::kInt8, 64, 0, ScaleFormat::kBFloat16, 5, 4}));
}

}  // namespace
}  // namespace kvxfer
