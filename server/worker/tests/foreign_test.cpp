// A session's record that is another driver's, another GPU's, another build's, or is damaged: a worker
// rebuilds nothing of it, and says why. The server looks at a checkpoint's manifest before, but the record is
// what a session is made of.
#include <capnp/serialize.h>

#include "schema/record.capnp.h"
#include "server/worker/rebuild.h"
#include "server/worker/session_state.h"
#include "server/worker/tests/mover.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

using Change = std::function<void(schema::SessionRecord::Builder)>;

// Of a session with a context, as its worker sends it.
std::vector<std::byte> recordOf(Client& client) {
  const auto [mine, theirs] = connectionHere();
  std::vector<std::byte> record;
  std::thread taker([&, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    socket.receiveBlock(record, kMostRecordBytes);
    socket.answer("the record is enough");
  });
  Mover mover(client);
  CHECK(mover.copy(mine).error == "the record is enough");
  taker.join();
  return record;
}

std::vector<std::byte> changed(std::span<const std::byte> record, const Change& change) {
  std::vector<capnp::word> words(record.size() / sizeof(capnp::word));
  std::memcpy(words.data(), record.data(), record.size());
  capnp::FlatArrayMessageReader message(kj::arrayPtr(words.data(), words.size()));
  capnp::MallocMessageBuilder copy;
  copy.setRoot(message.getRoot<schema::SessionRecord>());
  change(copy.getRoot<schema::SessionRecord>());
  const auto flat = capnp::messageToFlatArray(copy);
  const auto bytes = std::as_bytes(std::span(flat.begin(), flat.size()));
  return {bytes.begin(), bytes.end()};
}

// What a worker says of it.
std::string judged(std::span<const std::byte> record) {
  const auto [mine, theirs] = connectionHere();
  std::thread sender([record, mine = mine] {
    StateSocket socket{Descriptor(mine), [] { return false; }};
    std::vector<std::byte> asked;
    // Behind the record it answers twice, and asks for the code that it lacks.
    if (socket.sendBlock(record) && socket.send(contentDigest(record)) && socket.hearAnswer().empty() &&
        socket.receiveBlock(asked, kMostRecordBytes))
      socket.hearAnswer();
  });
  std::string why;
  {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    Rebuild rebuild(softDriver(), socket, true, [] { return false; });
    HostPages pages = hostPages();
    why = rebuild.receive(pages);
    Session session(softDriver(), sessionStart(), nullptr, std::move(pages),
                    std::make_unique<OwnAccount>(std::vector<uint64_t>{kLimit}));
    if (why.empty()) why = rebuild.make(session);
    rebuild.answer(why);
  }
  sender.join();
  return why;
}

}  // namespace

TEST_CASE("foreign: a record of another driver, GPU or build is refused, each with its reason") {
  Client client;
  client.open();
  const std::vector<std::byte> record = recordOf(client);
  REQUIRE_FALSE(record.empty());
  constexpr char kBuild[] = "the other worker is of another build of gpupool";
  constexpr char kDriver[] = "the other worker has another driver", kDamaged[] = "record is damaged";
  const std::vector<std::pair<const char*, Change>> cases{
      {kBuild, [](auto out) { out.setRowsHash(out.getRowsHash() ^ 1); }},
      {kBuild, [](auto out) { out.setFormat(out.getFormat() + 1); }},
      {kBuild, [](auto out) { out.setStagingBytes(out.getStagingBytes() * 2); }},
      {kBuild, [](auto out) { out.setWordsBytes(out.getWordsBytes() + 8); }},
      {kDriver, [](auto out) { out.setDriverVersion(out.getDriverVersion() + 10); }},
      {kDriver, [](auto out) { out.setSoftwareDriver(!out.getSoftwareDriver()); }},
      {"not a NVIDIA B300", [](auto out) { out.getDevices()[0].setName("NVIDIA B300"); }},
      {kDamaged, [](auto out) { out.initDevices(2); }},
      {kDamaged, [](auto out) { out.initDevices(0); }},
      {kDamaged, [](auto out) { out.setSpace(schema::kMaxSpaces); }}};
  for (const auto& [reason, change] : cases) {
    CAPTURE(reason);
    CHECK(contains(judged(changed(record, change)), reason));
  }
  CHECK(client.await(schema::RowOf<"sessionDrain">::id, Arguments().value(0).value(1)).status() ==
        CUDA_SUCCESS);
}
