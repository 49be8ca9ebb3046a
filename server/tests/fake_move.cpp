#include "server/tests/fake_move.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <utility>
#include <vector>

#include "schema/record.capnp.h"
#include "server/worker/state_socket.h"

namespace gpupool::server::test {
namespace {

constexpr uint64_t kFakeWords = 4096, kFakeStaging = 5000, kFakeDevice = (uint64_t{16} << 20) + 77;

void say(int socket, const std::string& text) {
  if (::send(socket, text.data(), text.size(), MSG_NOSIGNAL) < 0) _exit(9);
}

}  // namespace

FakeMove::~FakeMove() {
  {
    std::lock_guard lock(mutex_);
    if (state_ >= 0) shutdown(state_, SHUT_RDWR);
  }
  joinLast();
}

// Orders come on the thread that watches the server, the end on another.
void FakeMove::joinLast() {
  std::thread last;
  {
    std::lock_guard lock(mutex_);
    last = std::move(thread_);
  }
  if (last.joinable()) last.join();
}

void FakeMove::order(std::chrono::milliseconds drain, uint64_t epoch, int copier, int state) {
  joinLast();
  drainMs_ = static_cast<uint32_t>(drain.count());
  std::lock_guard lock(mutex_);
  copier_ = copier;
  state_ = state;
  thread_ = std::thread([this, epoch] { carryOut(epoch); });
}

void FakeMove::copy(std::chrono::milliseconds drain, int state) {
  joinLast();
  drainMs_ = static_cast<uint32_t>(drain.count());
  std::lock_guard lock(mutex_);
  state_ = state;
  thread_ = std::thread([this] { carryOutCopy(); });
}

void FakeMove::carryOutCopy() {
  const char how = behaviour_.exchange(0);
  if (how == '1') return refuse("a stream capture is open");
  if (how == '2') return;
  if (how == '3') abort();
  capnp::MallocMessageBuilder message;
  auto record = message.initRoot<schema::SessionRecord>();
  record.setRowsHash(7);
  record.setLastFrame(4711);
  record.setWordsBytes(kFakeWords);
  record.setStagingBytes(kFakeStaging);
  record.initPieces(1)[0].setBytes(kFakeDevice);
  const auto words = capnp::messageToFlatArray(message);
  const auto bytes = std::as_bytes(std::span(words.begin(), words.size()));
  StateSocket socket{Descriptor(dup(state_)), [this] { return process_.stopping(); }};
  std::string why;
  if (!socket.sendBlock(bytes) || !socket.send(contentDigest(bytes))) why = socket.error();
  if (why.empty()) why = socket.hearAnswer();
  std::vector<std::byte> asked;
  if (why.empty() && !socket.receiveBlock(asked, 0)) why = socket.error();
  if (why.empty()) why = socket.hearAnswer();
  for (const uint64_t length : {kFakeWords, kFakeStaging, kFakeDevice}) {
    if (how == '4' && length == kFakeDevice) abort();
    const std::vector<std::byte> content(length, std::byte{0x5a});
    if (why.empty() && !socket.sendContent(content)) why = socket.error();
  }
  if (why.empty()) why = socket.hearAnswer();
  if (!why.empty()) return refuse(why);
  {
    std::lock_guard lock(mutex_);
    close(std::exchange(state_, -1));
  }
  process_.reportMoved({"", kFakeDevice, drainMs_, 13});
}

void FakeMove::carryOut(uint64_t epoch) {
  const char how = behaviour_.exchange(0);
  if (how == '1') return refuse("a stream capture is open");
  if (how == '2') return;
  if (how == '3') abort();
  char asked[] = "take", answer[16] = "";
  if (copier_ >= 0 &&
      (::send(copier_, asked, 4, MSG_NOSIGNAL) != 4 || ::recv(copier_, answer, sizeof answer, 0) <= 0))
    return refuse("the copier is gone");
  const char first = how == 0 ? 'g' : how;
  if (::send(state_, &first, 1, MSG_NOSIGNAL) != 1) return refuse("the next worker is gone");
  if (::recv(state_, answer, 1, 0) != 1) return refuse("the next worker is gone");
  if (answer[0] != 'y') return refuse("the next worker could not rebuild the session");
  say(client_, "moved " + std::to_string(epoch));
}

void FakeMove::refuse(const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (copier_ >= 0) close(std::exchange(copier_, -1));
    close(std::exchange(state_, -1));
  }
  process_.reportMoved({.error = why});
}

void FakeMove::left() { process_.reportMoved({"", uint64_t{1} << 30, drainMs_, 11}); }

void FakeMove::stays() { refuse("the client could not reach the next worker"); }

std::optional<int> rebuildSession(WorkerProcess& process, int state) {
  char how = 0;
  if (::recv(state, &how, 1, 0) != 1) return std::nullopt;
  if (how == '4') abort();
  if (how == '5') {
    process.reportRebuilt("an array cannot be made");
    say(state, "n");
    return std::nullopt;
  }
  process.reportRebuilt("");
  say(state, "y");
  // Until the other worker is gone: then nobody sends a client any more.
  for (char end = 0; !process.stopping();) {
    if (const auto client = process.waitForClient(std::chrono::milliseconds(20))) return client;
    if (::recv(state, &end, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR)) break;
  }
  // Unless it was sent before, and is on its way.
  return process.waitForClient(std::chrono::seconds(3));
}

}  // namespace gpupool::server::test
