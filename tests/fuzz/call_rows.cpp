// The arguments of every call row, through the worker's own handlers.
//
// Input: u8 bit 0: over a network, bit 1: an image comes first (u16 length, bytes); u8 seed of the driver's
// answers; then calls {u32 the row's id (another number: a row all the same), u8 bit 0: awaited, bit 1: no
// context, u16 length, arguments}. Headers are always right. kAnyImage in arguments stands for the image's
// name.
#include <algorithm>
#include <vector>

#include "base/content.h"
#include "schema/handle_ids.h"
#include "schema/rows.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/worker/bench.h"

namespace gpupool::fuzz {

// Ids of all rows that travel, in ascending order of id.
const std::vector<uint32_t>& servedRows() {
  static const auto* rows = [] {
    auto* all = new std::vector<uint32_t>;
    auto add = [&]<class R>(R*) {
      if (R::travels) all->push_back(R::id);
    };
#define CALL(function, ...) add(static_cast<schema::RowOf<#function>*>(nullptr));
#define SESSION_CALL(function, ...) add(static_cast<schema::RowOf<#function>*>(nullptr));
#include "schema/calls/all.h"
#undef CALL
#undef SESSION_CALL
    std::sort(all->begin(), all->end());
    return all;
  }();
  return *rows;
}

namespace {

constexpr uint64_t kAnyImage = 0x1111'1111'1111'1111;

schema::ImageName store(Bench& bench, std::span<const std::byte> bytes) {
  schema::ImageName name;
  const Digest digest = contentDigest(bytes);
  std::memcpy(name.words, digest.data(), sizeof name.words);
  name.bytes = bytes.size();
  bench.session->images().append(name, 0, bytes);
  return name;
}

void putName(std::span<std::byte> message, const schema::ImageName& name) {
  for (size_t at = 0; at + sizeof name <= message.size(); at += 8) {
    uint64_t word;
    std::memcpy(&word, message.data() + at, sizeof word);
    if (word == kAnyImage) std::memcpy(message.data() + at, &name, sizeof name);
  }
}

}  // namespace
}  // namespace gpupool::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gpupool;
  using namespace gpupool::fuzz;
  Input input(data, size);
  const auto kind = input.value<uint8_t>();
  Bench bench((kind & 1) != 0, input.value<uint8_t>());
  if (!bench.greet()) __builtin_trap();
  bench.mintObjects();
  schema::ImageName image;
  if ((kind & 2) != 0) image = store(bench, input.blob());
  const auto& rows = servedRows();
  schema::Frame frame;
  frame.epoch = kEpoch;
  for (int calls = 0; calls < 64 && !input.empty(); ++calls) {
    frame.call = input.value<uint32_t>();
    if (!std::binary_search(rows.begin(), rows.end(), frame.call))
      frame.call = rows[frame.call % rows.size()];
    const auto flags = input.value<uint8_t>();
    frame.flags = flags & 1 ? schema::Frame::kAwait : 0;
    frame.context = flags & 2 ? 0 : handles::makeHandle(handles::Kind::context, 1, 1);
    const bool aside = server::findHandler(frame.call)->aside;
    frame.seq = server::SessionSeam::nextSeq(*bench.session, aside);
    auto bytes = input.blob();
    const schema::Notice notice{schema::NoticeType::aside, kEpoch, 0};
    const size_t header = aside ? sizeof notice : 0;
    std::vector<std::byte> message(header + sizeof frame + bytes.size());
    std::memcpy(message.data(), &notice, header);
    std::memcpy(message.data() + header, &frame, sizeof frame);
    if (!bytes.empty()) std::memcpy(message.data() + header + sizeof frame, bytes.data(), bytes.size());
    if (image.bytes != 0) putName(message, image);
    if (!(aside ? bench.control(message) : bench.frame(message))) break;
  }
  return 0;
}
