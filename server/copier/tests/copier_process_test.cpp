// gpupool-worker --copier, with this test as its server and its worker.
#include "support.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>

#include "schema/worker.capnp.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

namespace {

class Process {
 public:
  explicit Process(std::vector<std::string> options) {
    auto [mine, theirs] = socketPair();
    control_ = std::move(mine);
    softDriver();  // the same devices for both
    std::vector<std::string> words{WORKER_PROGRAM, "--copier", "--driver", SOFT_DRIVER};
    words.insert(words.end(), options.begin(), options.end());
    std::vector<char*> list;
    list.reserve(words.size() + 1);
    for (auto& word : words) list.push_back(word.data());
    list.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      signal(SIGTERM, SIG_DFL);  // Catch2's handler is not the copier's
      const int end = fcntl(theirs, F_DUPFD, 10);
      dup2(end, 3);
      close(end);
      execv(list[0], list.data());
      _exit(127);
    }
  }
  ~Process() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    exitStatus();
  }
  // "ready", or what failed.
  std::string report() {
    std::vector<capnp::word> room(1024);
    const ssize_t bytes = recv(control_, room.data(), room.size() * sizeof(capnp::word), 0);
    if (bytes <= 0) return "nothing";
    capnp::FlatArrayMessageReader reader(
        kj::arrayPtr(room.data(), static_cast<size_t>(bytes) / sizeof(capnp::word)));
    const auto report = reader.getRoot<schema::WorkerReport>();
    return report.isReady() ? "ready" : report.isFailed() ? report.getFailed().cStr() : "something else";
  }
  Descriptor connect() {
    auto [mine, theirs] = socketPair();
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setServe();
    order(message, {theirs});
    return std::move(mine);
  }
  void order(capnp::MessageBuilder& message, std::vector<int> descriptors) {
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    REQUIRE(sendWithDescriptors(control_, std::as_bytes(std::span(bytes.begin(), bytes.size())),
                                descriptors) > 0);
  }
  // Gives it a door. The other end of that is this test's.
  void outlive(uint32_t awayMs) {
    int ends[2];
    REQUIRE(socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, ends) == 0);
    visitor_ = Descriptor(ends[0]);
    const Descriptor door(ends[1]);
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().setOutlive(awayMs);
    order(message, {door});
  }
  void knock(const std::string& bytes) {
    REQUIRE(sendWithDescriptors(visitor_, std::as_bytes(std::span(bytes)), {}) > 0);
  }
  // As the server's next life.
  void adopt(uint64_t budget) {
    auto [mine, theirs] = socketPair();
    control_ = std::move(mine);
    capnp::MallocMessageBuilder message;
    message.initRoot<schema::WorkerOrder>().initAdopt().setBudgetBytes(budget);
    const auto words = capnp::messageToFlatArray(message);
    const auto bytes = words.asBytes();
    const int descriptor = theirs;
    REQUIRE(sendWithDescriptors(visitor_, std::as_bytes(std::span(bytes.begin(), bytes.size())),
                                std::span(&descriptor, 1)) > 0);
  }
  void send(int number) { kill(pid_, number); }
  void hangUp() { control_ = Descriptor(); }
  int exitStatus() {
    int status = -1;
    if (pid_ > 0) waitpid(std::exchange(pid_, -1), &status, 0);
    return status;
  }

 private:
  Descriptor control_, visitor_;
  pid_t pid_ = -1;
};

}  // namespace

TEST_CASE("a session's memory goes into another process and back") {
  Process copier({"--budget", "268435456", "--touch-ahead", "67108864", "--verify"});
  REQUIRE(copier.report() == "ready");
  Memory memory(manyPieces(40));
  memory.createAll();
  memory.fill(1);
  auto link = linkTo(copier.connect());
  REQUIRE(link.reserve(memory.pieces()).empty());
  REQUIRE(link.takeOut(exporting(memory), releasing(memory)).empty());
  memory.createAll();
  REQUIRE(link.bringIn(exporting(memory)).empty());
  CHECK(memory.wrong(1) == 0);
  // Orders that are none change nothing.
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setResume();
  copier.order(message, {});
  CHECK(link.bringIn(exporting(memory)).empty());
  capnp::MallocMessageBuilder stop;
  stop.initRoot<schema::WorkerOrder>().setStop("enough");
  copier.order(stop, {});
  CHECK(copier.exitStatus() == 0);
  CHECK(link.lost());
}

TEST_CASE("the copier's end is seen at once, by who waits for it too") {
  for (const int way : {SIGTERM, SIGHUP, SIGKILL, 0}) {
    INFO("way " << way);
    Process copier({"--budget", "268435456"});
    REQUIRE(copier.report() == "ready");
    auto idle = linkTo(copier.connect()), waits = linkTo(copier.connect());
    Memory memory(std::vector<CopierPiece>(100, {0, kUnit}));
    memory.createAll();
    REQUIRE(idle.reserve(std::vector<CopierPiece>{{0, kUnit}}).empty());
    REQUIRE(waits.reserve(memory.pieces()).empty());
    CHECK(!idle.lost());
    size_t asked = 0;
    const std::string why = waits.takeOut(
        [&](size_t index) {
          if (++asked == 70 && way != 0) copier.send(way);
          if (asked == 70 && way == 0) copier.hangUp();
          if (asked == 70) copier.exitStatus();
          return memory.exportPiece(index);
        },
        [](size_t) {});
    CHECK(contains(why, "the copier has ended"));
    CHECK(idle.lost());
    CHECK(contains(idle.takeOut(exporting(memory), [](size_t) {}), "the copier has ended"));
  }
}

TEST_CASE("with a door the copier outlives its server while it keeps something, and serves the next one") {
  Process copier({"--budget", "268435456"});
  REQUIRE(copier.report() == "ready");
  copier.outlive(60'000);
  Memory memory(manyPieces(40));
  memory.createAll();
  memory.fill(1);
  auto link = linkTo(copier.connect());
  REQUIRE(link.reserve(memory.pieces()).empty());
  REQUIRE(link.takeOut(exporting(memory), releasing(memory)).empty());
  for (const bool again : {false, true}) {
    INFO("again " << again);
    copier.hangUp();
    copier.send(SIGHUP);  // as of a server that is its parent
    copier.knock(std::string(64, 'x'));
    CHECK_FALSE(link.lost());
    copier.adopt(4 * kUnit);
    REQUIRE(copier.report() == "ready");
  }
  auto more = linkTo(copier.connect());
  // The next life's budget counts, and what is kept is counted in it.
  CHECK(contains(more.reserve(memory.pieces()), "raise suspend_memory"));
  memory.createAll();
  REQUIRE(link.bringIn(exporting(memory)).empty());
  CHECK(memory.wrong(1) == 0);
  // With the last of what it keeps it ends.
  copier.hangUp();
  usleep(300'000);
  CHECK_FALSE(link.lost());
  link = linkTo(Descriptor());
  more = linkTo(Descriptor());
  CHECK(copier.exitStatus() == 0);
}

TEST_CASE("a copier that keeps nothing ends with its server") {
  Process copier({"--budget", "268435456"});
  REQUIRE(copier.report() == "ready");
  copier.outlive(60'000);
  copier.hangUp();
  CHECK(copier.exitStatus() == 0);
}

TEST_CASE("a copier that cannot start says why") {
  Process copier({"--driver", "/nowhere/libcuda.so", "--budget", "1"});
  CHECK(contains(copier.report(), "/nowhere/libcuda.so"));
  CHECK(WEXITSTATUS(copier.exitStatus()) == 1);
  for (const auto& options :
       std::vector<std::vector<std::string>>{{"--budget", "many"}, {"--nonsense"}, {"--folder"}}) {
    Process wrong(options);
    CHECK(wrong.report() == "nothing");
    CHECK(WEXITSTATUS(wrong.exitStatus()) == 1);
  }
}
