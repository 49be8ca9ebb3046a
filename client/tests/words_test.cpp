#include "client/words.h"

#include <algorithm>
#include <vector>

#include "catch.h"

using namespace gpupool;
using client::Words;

TEST_CASE("words: what is told late changes nothing: a word never goes back") {
  Words words(nullptr);
  const uint64_t index = words.take();
  REQUIRE(index != 0);
  words.set(index, 5);
  words.set(index, 4);  // a reply has told 5, and the worker's notice of 4 comes behind it
  CHECK(words.value(index) == 5);
  CHECK(words.reached(index, 5));
  words.set(index, 6);
  CHECK(words.value(index) == 6);
  words.set(schema::kWordsCount, 7);  // of a worker that names a word that there is not
}

TEST_CASE("words: an index is taken again when its last value has come, and goes on from there") {
  Words words(nullptr);
  std::vector<uint64_t> taken;
  for (int i = 0; i < 64; ++i) taken.push_back(words.take());
  for (const uint64_t index : taken) words.retire(index, 3);
  const uint64_t fresh = words.take();
  CHECK(std::ranges::find(taken, fresh) == taken.end());  // none of them has come
  words.set(taken[7], 3);
  words.retire(fresh, 0);  // looks over all of them
  const uint64_t again = words.take();
  CHECK((again == taken[7] || again == fresh));
  const uint64_t last = words.take();
  CHECK((last == taken[7] || last == fresh));
  CHECK(words.value(taken[7]) == 3);
}

TEST_CASE("words: an error that sticks ends every wait") {
  Words words(nullptr);
  const uint64_t index = words.take();
  words.setSticky(CUDA_ERROR_LAUNCH_FAILED);
  words.setSticky(CUDA_ERROR_ILLEGAL_ADDRESS);
  bool watched = false;
  CHECK(words.wait(index, 1, true, [&] { watched = true; }) == CUDA_ERROR_LAUNCH_FAILED);
  CHECK_FALSE(watched);
}
