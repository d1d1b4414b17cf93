#ifndef KVXFER_TESTS_CPP_FUZZ_CORPUS_H_
#define KVXFER_TESTS_CPP_FUZZ_CORPUS_H_

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// What the fuzzer has found worth keeping, once through its target, which ends the process at what
// it does not expect. Returns how many inputs that were.
inline size_t run_corpus(const std::string& name, int (*target)(const uint8_t*, size_t)) {
  size_t inputs = 0;
  const auto folder = std::filesystem::path(KVXFER_TESTS_FUZZ) / name;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    std::ifstream file(entry.path(), std::ios::binary);
    // A copy of just its size, so that sanitizers find a read beyond its end.
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    target(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++inputs;
  }
  return inputs;
}

#endif  // KVXFER_TESTS_CPP_FUZZ_CORPUS_H_
