#include "fuzz_corpus.h"

#include <doctest/doctest.h>

extern "C" {
int kvxfer_corpus_messages(const uint8_t* data, size_t size);
int kvxfer_corpus_chunk(const uint8_t* data, size_t size);
// For the mutator of chunk.cc, which nobody calls here.
size_t LLVMFuzzerMutate(uint8_t*, size_t size, size_t) { return size; }
}

TEST_CASE("control messages of the fuzzer's corpus are decoded or refused") {
  CHECK(run_corpus("messages", kvxfer_corpus_messages) > 100);
}

TEST_CASE("coded chunks of the fuzzer's corpus are decoded or refused") {
  CHECK(run_corpus("chunk", kvxfer_corpus_chunk) > 50);
}
