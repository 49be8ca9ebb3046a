#include "client/words.h"

#include <unistd.h>

#include <algorithm>
#include <thread>
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

TEST_CASE("words: a page that is not shared any more keeps its words, and its waiters hear of new ones") {
  const auto page = transport::SharedMemory::create(schema::kWordsBytes);
  const auto other =
      transport::SharedMemory::adopt(dup(page->descriptor()), page->size());  // the worker's view
  auto* const written = reinterpret_cast<std::atomic<uint64_t>*>(other->data() + schema::kWordsOffset);
  Words words(page);
  const uint64_t first = words.take(), second = words.take();
  written[first] = 7;
  CHECK(words.reached(first, 7));
  words.setUnchanged(first, 7);
  CHECK_FALSE(words.unchanged(first, 7));  // of a network alone
  std::thread sleeper([&] { CHECK(words.wait(second, 1, true, [] {}) == CUDA_SUCCESS); });
  REQUIRE(words.leaveShared());
  CHECK(words.value(first) == 7);
  written[first] = 8;  // of a worker that was left
  written[second] = 1;
  CHECK(words.value(first) == 7);
  CHECK_FALSE(words.reached(second, 1));
  words.set(second, 1);
  words.ring();
  sleeper.join();
  words.setUnchanged(first, 7);
  CHECK(words.unchanged(first, 7));
  CHECK(words.leaveShared());
  CHECK(words.value(second) == 1);
}

TEST_CASE(
    "words: a page that is shared again has what was told meanwhile, and its waiters hear of new words") {
  const auto page = transport::SharedMemory::create(schema::kWordsBytes);
  Words words(GENERATE(true, false) ? page : nullptr);
  const uint64_t first = words.take(), second = words.take(), third = words.take();
  REQUIRE(words.leaveShared());
  words.set(first, 5);
  words.set(third, 4);
  words.setUnchanged(first, 5);
  CHECK(words.unchanged(first, 5));
  const auto next = transport::SharedMemory::create(schema::kWordsBytes);
  auto* const written = reinterpret_cast<std::atomic<uint64_t>*>(next->data() + schema::kWordsOffset);
  written[third] = 9;  // of which nobody was told
  std::thread sleeper([&] { CHECK(words.wait(second, 1, true, [] {}) == CUDA_SUCCESS); });
  REQUIRE(words.enterShared(transport::SharedMemory::adopt(dup(next->descriptor()), next->size())));
  CHECK(words.value(first) == 5);
  CHECK(written[first] == 5);
  CHECK(words.value(third) == 9);
  CHECK_FALSE(words.unchanged(first, 5));
  written[second] = 1;
  sleeper.join();
  // Out once more: what the worker writes there is nothing to this process.
  REQUIRE(words.leaveShared());
  written[first] = 6;
  CHECK(words.value(first) == 5);
  CHECK(words.value(third) == 9);
}

TEST_CASE("words: an error that sticks goes along, wherever the page is") {
  Words words(transport::SharedMemory::create(schema::kWordsBytes));
  words.setSticky(CUDA_ERROR_LAUNCH_FAILED);
  REQUIRE(words.leaveShared());
  CHECK(words.sticky() == CUDA_ERROR_LAUNCH_FAILED);
  const auto next = transport::SharedMemory::create(schema::kWordsBytes);
  REQUIRE(words.enterShared(next));
  CHECK(words.sticky() == CUDA_ERROR_LAUNCH_FAILED);
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
