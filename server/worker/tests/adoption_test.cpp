// A session that goes to another worker of its server: that one works on the very pages of the session's
// words, staging memory and pinned memory, for over shm the client has them mapped, and goes on writing
// there. The other worker is a process of its own, for both have the session's addresses: this program again,
// with the test case that is hidden.
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstdlib>

#include "server/worker/rebuild.h"
#include "server/worker/tests/mover.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr char kStateVariable[] = "GPUPOOL_TEST_STATE", kTalkVariable[] = "GPUPOOL_TEST_TALK";
constexpr uint64_t kBefore = 11, kBehind = 22, kTheirs = 33;
constexpr size_t kAt = schema::kWordsOffset + 8 * size_t{9},
                 kTheirsAt = kAt + 8;  // of words that nobody uses

using Memory = std::shared_ptr<transport::SharedMemory>;
using Pages = std::vector<std::pair<std::string, Memory>>;

Pages pagesOf(Session& session) {
  Pages pages{{"words", session.views().words()}, {"staging", session.views().staging()}};
  for (const auto& [address, memory] : session.space().hostPieces()) pages.emplace_back("pinned", memory);
  return pages;
}

uint64_t read(const Memory& memory, size_t at) {
  uint64_t value = 0;
  std::memcpy(&value, memory->data() + at, sizeof value);
  return value;
}
void write(const Memory& memory, size_t at, uint64_t value) {
  std::memcpy(memory->data() + at, &value, sizeof value);
}
std::string say(const std::string& name, uint64_t value) { return name + " " + std::to_string(value) + "; "; }

// As in server/worker/main.cpp, of a session without a context that was there ahead.
std::string receiveHere(StateSocket& state, Rebuild& rebuild, HostPages& pages) {
  uint32_t ahead = 0;
  if (!state.receive(std::as_writable_bytes(std::span(&ahead, 1))) || !state.answer("")) return state.error();
  return rebuild.receive(pages);
}

// The worker to which the session goes, as a process.
class Next {
 public:
  explicit Next(int state) : state_(state) {
    std::tie(talk_, theirs_) = connectionHere();
    child_ = fork();
    if (child_ == 0) {
      for (const int kept : {state, theirs_}) fcntl(kept, F_SETFD, 0);
      setenv(kStateVariable, std::to_string(state).c_str(), 1);
      setenv(kTalkVariable, std::to_string(theirs_).c_str(), 1);
      execl("/proc/self/exe", "worker_rebuild_test", "adoption: the other worker", nullptr);
      _exit(127);
    }
    close(state_);
    close(theirs_);
  }
  ~Next() {
    close(talk_);
    waitpid(child_, nullptr, 0);
  }
  // Has it look at its memory, and write there. What it found.
  std::string look() {
    char text[512];
    pollfd answer{talk_, POLLIN, 0};
    if (send(talk_, "?", 1, MSG_NOSIGNAL) != 1 || poll(&answer, 1, 60000) != 1) return "it says nothing";
    const ssize_t got = recv(talk_, text, sizeof text, 0);
    return {text, static_cast<size_t>(std::max<ssize_t>(got, 0))};
  }

 private:
  int state_, talk_ = -1, theirs_ = -1;
  pid_t child_ = -1;
};

}  // namespace

// Not a test: what Next starts.
TEST_CASE("adoption: the other worker", "[.]") {
  const char *state = std::getenv(kStateVariable), *talk = std::getenv(kTalkVariable);
  if (state == nullptr || talk == nullptr) return;
  StateSocket socket{Descriptor(std::atoi(state)), [] { return false; }};
  Rebuild rebuild(softDriver(), socket, false, [] { return false; });
  HostPages pages = hostPages();
  std::string why = receiveHere(socket, rebuild, pages);
  Session session(softDriver(), sessionStart(), nullptr, std::move(pages),
                  std::make_unique<OwnAccount>(std::vector<uint64_t>{kLimit}));
  if (why.empty()) why = rebuild.make(session);
  rebuild.answer(why);
  char asked = 0;
  if (recv(std::atoi(talk), &asked, 1, 0) != 1) _exit(1);
  std::string text = why;
  if (why.empty())
    for (const auto& [name, memory] : pagesOf(session)) {
      text += say(name, read(memory, kAt));
      write(memory, kTheirsAt, kTheirs);
    }
  _exit(send(std::atoi(talk), text.data(), text.size(), MSG_NOSIGNAL) < 0 ? 1 : 0);
}

TEST_CASE("adoption: another worker of the server has the session's host memory, not a copy of it") {
  Client client;
  client.open();
  // Goes ahead, and the pages with it.
  REQUIRE(client.await(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0))
              .status() == CUDA_SUCCESS);
  REQUIRE(client
              .await(ROW("sessionHostMap"),
                     Arguments().value(client.space().hostBase + kMiB).value(kMiB).value(0).value(1))
              .status() == CUDA_SUCCESS);
  const Pages pages = pagesOf(*client.session);
  REQUIRE(pages.size() == 3);
  for (const auto& [name, memory] : pages) write(memory, kAt, kBefore);
  const auto [mine, theirs] = connectionHere();
  const auto [copier, copiers] = connectionHere();  // to nobody: the session has no device memory
  const Descriptor end(copiers);
  Next next(theirs);
  Mover mover(client);
  CHECK(mover.moveHere(copier, mine).error == "");
  // As the program does, which has these pages mapped, behind the move.
  for (const auto& [name, memory] : pages) write(memory, kAt, kBehind);
  CHECK(next.look() == say("words", kBehind) + say("staging", kBehind) + say("pinned", kBehind));
  for (const auto& [name, memory] : pages) {
    CAPTURE(name);
    CHECK(read(memory, kTheirsAt) == kTheirs);
  }
}
