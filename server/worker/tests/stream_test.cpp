// A session that goes to a worker on another machine: the bytes on the stream, and a peer at either end that
// lies, damages, goes or says nothing. The other worker is a process of its own, for both have the session's
// addresses: this program again, with the test case that is hidden.
#include <capnp/serialize.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstdlib>

#include "schema/record.capnp.h"
#include "server/files/kept_pages.h"
#include "server/files/session_file.h"
#include "server/worker/device_stream.h"
#include "server/worker/rebuild.h"
#include "server/worker/session_state.h"
#include "server/worker/tests/mover.h"
#include "server/worker/tests/stream_program.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;
using namespace std::chrono_literals;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr unsigned kConnections = 3;  // beside the stream
constexpr char kStateVariable[] = "GPUPOOL_TEST_STATE", kReportVariable[] = "GPUPOOL_TEST_REPORT";
constexpr char kRoomVariable[] = "GPUPOOL_TEST_ROOM";
constexpr char kElsewhereVariable[] = "GPUPOOL_TEST_ELSEWHERE";  // its driver places variables elsewhere
constexpr char kFullVariable[] = "GPUPOOL_TEST_FULL";            // its device has little memory left
constexpr char kFailsVariable[] = "GPUPOOL_TEST_FAILS";  // its driver's copies fail, but for the first one
constexpr char kForgetsVariable[] =
    "GPUPOOL_TEST_FORGETS";  // its driver does not copy all that it is told to

// The worker to which the session goes, as a process.
class Next {
 public:
  // state: taken. driver: the variable by which its driver is another one. room: of its lease.
  Next(int state, const char* driver) : Next(state, kLimit, driver) {}
  explicit Next(int state, uint64_t room = kLimit, const char* driver = nullptr) {
    int ends[2];
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    report_ = ends[0];
    child_ = fork();
    if (child_ == 0) {
      fcntl(state, F_SETFD, 0);
      fcntl(ends[1], F_SETFD, 0);
      setenv(kStateVariable, std::to_string(state).c_str(), 1);
      setenv(kReportVariable, std::to_string(ends[1]).c_str(), 1);
      setenv(kRoomVariable, std::to_string(room).c_str(), 1);
      if (driver != nullptr) setenv(driver, "1", 1);
      execl("/proc/self/exe", "worker_stream_test", "stream: the other worker", nullptr);
      _exit(127);
    }
    close(ends[1]);
    close(state);
  }
  ~Next() {
    close(report_);
    waitpid(child_, nullptr, 0);
  }
  // The picture of its session, or "not rebuilt: " and why.
  std::string report() {
    std::string text;
    char part[4096];
    for (ssize_t got; (got = read(report_, part, sizeof part)) > 0;)
      text.append(part, static_cast<size_t>(got));
    return text;
  }

 private:
  int report_ = -1;
  pid_t child_ = -1;
};

// Between the two: passes on what goes either way, and does something to one byte of what the old one sends.
class Between {
 public:
  enum How { nothing, flips, ends };
  Between(How how, uint64_t at) : how_(how), at_(at) {
    std::tie(olds, old_) = connection();
    std::tie(news, new_) = connection();
    thread_ = std::thread([this] { run(); });
  }
  ~Between() { thread_.join(); }
  int olds = -1, news = -1;  // their ends, for them to take
  uint64_t passed() const { return passed_; }

 private:
  void run() {
    std::vector<char> room(1 << 16);
    pollfd waiting[2] = {{old_, POLLIN, 0}, {new_, POLLIN, 0}};
    while (poll(waiting, 2, -1) > 0) {
      if (waiting[1].revents != 0 && !pass(new_, old_, room, false)) break;
      if (waiting[0].revents != 0 && !pass(old_, new_, room, true)) break;
    }
    close(old_);
    close(new_);
  }
  bool pass(int from, int to, std::vector<char>& room, bool counted) {
    const ssize_t got = recv(from, room.data(), room.size(), 0);
    auto bytes = static_cast<size_t>(std::max<ssize_t>(got, 0));
    const uint64_t before = passed_;
    if (counted) passed_ += bytes;
    if (how_ == flips && counted && at_ >= before && at_ < passed_) room[at_ - before] ^= 0x10;
    const bool cut = how_ == ends && counted && at_ < passed_;
    if (cut) bytes = at_ - before;
    if (got > 0 && sendAll(to, room, bytes) && !cut) return true;
    // What the new one still says must reach the old one.
    shutdown(to, SHUT_WR);
    ssize_t more = 0;
    while (counted && (more = recv(new_, room.data(), room.size(), 0)) > 0)
      if (!sendAll(old_, room, static_cast<size_t>(more))) break;
    return false;
  }
  static bool sendAll(int to, const std::vector<char>& room, size_t bytes) {
    for (size_t at = 0; at < bytes;) {
      const ssize_t sent = send(to, room.data() + at, bytes - at, MSG_NOSIGNAL);
      if (sent <= 0) return false;
      at += static_cast<size_t>(sent);
    }
    return true;
  }

  const How how_;
  const uint64_t at_;
  int old_ = -1, new_ = -1;
  std::atomic<uint64_t> passed_{0};
  std::thread thread_;
};

// All that the old worker sends goes by the stream.
struct OneConnection {
  OneConnection() { ParallelSockets::want(0); }
  ~OneConnection() { ParallelSockets::want(kConnections); }
};

// What Next says behind the picture of a session that moved, and of one that came out of a file.
constexpr char kMoved[] = "code, then memory\nthe graph runs\n";
constexpr char kRestored[] = "memory, then code\nthe graph runs\n";

// Plays the new worker, up to a point.
enum class Stop {
  atOnce,
  inTheRecord,
  behindTheRecord,
  refusesAtOnce,
  asksForOtherCode,
  asksForMore,
  endsInItsList,
  behindTheCode,
  refusesTheCalls,
  behindTheWords,
  inDeviceMemory,
  refusesDeviceMemory,
  behindAll,
  refusesAll,
  none
};
struct Playing {
  StateSocket& socket;
  Stop stop;
  bool last = false;  // it stops in the record that comes last, and not in that which came ahead
  std::vector<std::byte> record;
  size_t cameAhead = 0, came = 0;  // calls
  capnp::ReaderOptions options{.traversalLimitInWords = uint64_t{1} << 30};

  void tell(const std::string& text) { socket.sendBlock(std::as_bytes(std::span(text))); }
  bool content(uint64_t bytes) {
    std::vector<std::byte> room(bytes);
    return socket.receiveContent(room);
  }
  void play() {
    if (stop == Stop::atOnce) return;
    for (bool ahead = true; ahead;) {
      if (!last && stop == Stop::inTheRecord) {
        record.resize(100);
        socket.receive(record);
        return;
      }
      Digest digest{};
      if (!socket.receiveBlock(record, kMostRecordBytes) || !socket.receive(digest)) return;
      CHECK(contentDigest(record) == digest);
      capnp::FlatArrayMessageReader message(kj::arrayPtr(reinterpret_cast<const capnp::word*>(record.data()),
                                                         record.size() / sizeof(capnp::word)),
                                            options);
      const auto root = message.getRoot<schema::SessionRecord>();
      ahead = root.getAhead();
      (ahead ? cameAhead : came) = root.getEntries().size();
      const Stop here = ahead == last ? Stop::none : stop;
      if (here == Stop::behindTheRecord) return;
      if (here == Stop::refusesAtOnce) return tell("no such device here");
      tell("");
      if (!code(root, here)) return;
      if (!ahead) contents(root);
    }
  }
  bool code(schema::SessionRecord::Reader root, Stop here) {
    auto names = imagesOf(root);
    CHECK(names.size() == (root.getAhead() ? 1 : 0));
    const uint64_t bytes = names.empty() ? 0 : names[0].bytes;
    if (here == Stop::asksForOtherCode) names[0].words[2] ^= 1;
    if (here == Stop::asksForMore) names.resize(100, names[0]);
    const auto list = std::as_bytes(std::span(names));
    if (here == Stop::endsInItsList) {
      const uint64_t length = list.size();
      socket.send(std::as_bytes(std::span(&length, 1)));
      socket.send(list.first(7));
      return false;
    }
    if (!socket.sendBlock(list)) return false;
    std::vector<std::byte> image(bytes);
    if (names.size() > 1 || !socket.receive(image)) return false;
    if (here == Stop::behindTheCode) return false;
    tell(here == Stop::refusesTheCalls ? "a texture answers another value" : "");
    return here != Stop::refusesTheCalls;
  }
  void contents(schema::SessionRecord::Reader root) {
    if (!content(hostPages().words->size()) || stop == Stop::behindTheWords ||
        !content(root.getStagingBytes()))
      return;
    for (const auto host : root.getHost())
      if (!content(host.getBytes())) return;
    uint64_t bytes = 0;
    for (const auto piece : root.getPieces()) bytes += piece.getBytes();
    if (stop == Stop::inDeviceMemory || stop == Stop::refusesDeviceMemory) bytes = StateSocket::kPartBytes;
    const bool came = content(bytes);
    if (stop == Stop::refusesDeviceMemory) {
      tell("no such memory here");
      socket.hearOut(kLong);
    }
    if (!came || stop == Stop::inDeviceMemory || stop == Stop::refusesDeviceMemory) return;
    for (const auto variable : root.getVariables())
      if (!content(variable.getBytes())) return;
    for (const auto array : root.getArrays())
      if (!content(array.getBytes())) return;
    if (stop == Stop::behindAll) return;
    tell(stop == Stop::refusesAll ? "an array cannot be written" : "");
  }
};

}  // namespace

// Not a test: what Next starts.
TEST_CASE("stream: the other worker", "[.]") {
  const auto number = [](const char* name) {
    const char* text = std::getenv(name);
    return text == nullptr ? -1 : std::atoi(text);
  };
  const int state = number(kStateVariable), report = number(kReportVariable);
  if (state < 0) return;
  static const auto real = softDriver().cuModuleGetGlobal_v2;
  if (std::getenv(kElsewhereVariable) != nullptr)  // this process's own table
    const_cast<Driver&>(softDriver()).cuModuleGetGlobal_v2 = [](CUdeviceptr* at, size_t* bytes,
                                                                CUmodule module, const char* name) {
      const CUresult result = real(at, bytes, module, name);
      *at += 256;
      return result;
    };
  static const auto copyIn = softDriver().cuMemcpyHtoD_v2;
  if (std::getenv(kForgetsVariable) != nullptr)  // some of what it is given
    const_cast<Driver&>(softDriver()).cuMemcpyHtoD_v2 = [](CUdeviceptr to, const void* from, size_t bytes) {
      return copyIn(to, from, bytes > kMiB ? bytes - 8 : bytes);
    };
  if (std::getenv(kFailsVariable) != nullptr)
    const_cast<Driver&>(softDriver()).cuMemcpyHtoD_v2 = [](CUdeviceptr to, const void* from, size_t bytes) {
      static std::atomic<int> large{0};
      return bytes > kMiB && large++ != 0 ? CUDA_ERROR_LAUNCH_FAILED : copyIn(to, from, bytes);
    };
  if (std::getenv(kFullVariable) != nullptr)
    const_cast<Driver&>(softDriver()).cuMemGetInfo_v2 = [](size_t* free, size_t* all) {
      *free = kMiB, *all = 1024 * kMiB;
      return CUDA_SUCCESS;
    };
  static std::string order;
  static const auto load = softDriver().cuModuleLoadDataEx;
  static const auto create = softDriver().cuMemCreate;
  const_cast<Driver&>(softDriver()).cuModuleLoadDataEx = [](auto... arguments) {
    if (order.find("code") == std::string::npos) order += order.empty() ? "code, then " : "code\n";
    return load(arguments...);
  };
  const_cast<Driver&>(softDriver()).cuMemCreate = [](auto... arguments) {
    if (order.find("memory") == std::string::npos) order += order.empty() ? "memory, then " : "memory\n";
    return create(arguments...);
  };
  StateSocket socket{Descriptor(state), [] { return false; }};
  Rebuild rebuild(softDriver(), socket, true, [] { return false; });
  HostPages pages = hostPages();
  std::string why = rebuild.receive(pages);
  auto account =
      std::make_unique<OwnAccount>(std::vector<uint64_t>{static_cast<uint64_t>(number(kRoomVariable))});
  Session session(softDriver(), sessionStart(), nullptr, std::move(pages), std::move(account));
  if (why.empty()) why = rebuild.make(session);
  std::string text = why.empty() ? picture(session) : "not rebuilt: " + why;
  if (why.empty()) {
    CUgraphExec exec = nullptr;
    CUstream stream = nullptr;
    session.makeCurrentAgain(kContext);
    const auto* first = reinterpret_cast<const unsigned char*>(
        schema::kSpaces[session.space().reserved()].deviceBase + 4 * kMiB);
    const bool ran = session.objects().find(kExec, exec) && session.objects().find(kStream, stream) &&
                     softDriver().cuGraphLaunch(exec, stream) == CUDA_SUCCESS &&
                     softDriver().cuCtxSynchronize() == CUDA_SUCCESS && first[63] == kGraphByte;
    text += order;
    text += ran ? "the graph runs\n" : "the graph does not run\n";
    text += session.images().pending().empty() ? "" : "code is held for nobody\n";
  }
  rebuild.answer(why);
  if (write(report, text.data(), text.size()) != static_cast<ssize_t>(text.size())) _exit(1);
  _exit(0);
}

// Those with a session of their own come first: where addresses are scarce (ThreadSanitizer), the program has
// the only space.
TEST_CASE("stream: a wait for a silent worker ends when the session does") {
  Client client(softDriver(), nullptr, -1, &overNetwork);
  client.open();
  const auto [mine, theirs] = connection();
  Mover mover(client);
  const Course course(client);
  mover.begin(mine);
  StateSocket socket{Descriptor(theirs), [] { return false; }};
  std::vector<std::byte> record;
  REQUIRE(socket.receiveBlock(record, kMostRecordBytes));
  const auto began = std::chrono::steady_clock::now();
  client.session->stop("the lease is over");
  CHECK(mover.outcome().error == "the session is ending");
  CHECK(std::chrono::steady_clock::now() - began < kLong);
}

TEST_CASE("stream: a lease that has no room there keeps its session here") {
  Program& program = theProgram();
  const std::string here = picture(*program.client.session);
  const auto [mine, theirs] = connection();
  Next next(theirs, 35 * kMiB);
  Mover mover(program.client);
  CHECK(mover.move(mine).error == "the lease has no room for the session's device memory");
  CHECK(contains(next.report(), "not rebuilt: "));
  CHECK(picture(*program.client.session) == here);
}

// Kernels hold the values that were answered before.
TEST_CASE("stream: a driver that answers a recorded call otherwise has no session from elsewhere") {
  Program& program = theProgram();
  const std::string here = picture(*program.client.session);
  const auto [mine, theirs] = connection();
  Next next(theirs, kElsewhereVariable);
  Mover mover(program.client);
  CHECK(contains(mover.move(mine).error, "cuModuleGetGlobal_v2 answers other values than it did"));
  CHECK(contains(next.report(), "not rebuilt: cuModuleGetGlobal_v2 answers other values"));
  CHECK(picture(*program.client.session) == here);
}

// What came was right, and so is what the driver answers: only who looks again sees it.
TEST_CASE("stream: where tests compare contents, a session whose memory is other than it was stays here") {
  Program& program = theProgram();
  const std::string here = picture(*program.client.session);
  const auto [mine, theirs] = connection();
  Next next(theirs, kForgetsVariable);
  Mover mover(program.client, true);
  CHECK(contains(mover.move(mine).error, "the contents differ: device memory, part 0 is not what it was"));
  CHECK(contains(next.report(), "not rebuilt: the contents differ"));
  CHECK(picture(*program.client.session) == here);
}

// Of 36 MiB, three parts, over the stream and one more connection, or three.
TEST_CASE("stream: where a copy fails at either end, the session goes on here, and the reason is told") {
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  {
    const auto [mine, theirs] = connection();
    Next next(theirs, kFailsVariable);
    CHECK(contains(mover.move(mine).error, "cuMemcpyHtoD gives"));
    CHECK(contains(next.report(), "not rebuilt: the session's device memory cannot be copied: cuMemcpyHtoD"));
  }
  {
    auto& driver = const_cast<Driver&>(softDriver());
    static const auto copyOut = driver.cuMemcpyDtoH_v2;
    static std::atomic<int> large{0};
    driver.cuMemcpyDtoH_v2 = [](void* to, CUdeviceptr from, size_t bytes) {
      return bytes > kMiB && large++ == 1 ? CUDA_ERROR_LAUNCH_FAILED : copyOut(to, from, bytes);
    };
    const auto [mine, theirs] = connection();
    Next next(theirs);
    CHECK(contains(mover.move(mine).error, "cuMemcpyDtoH gives"));
    driver.cuMemcpyDtoH_v2 = copyOut;
    CHECK(contains(next.report(), "not rebuilt: the other worker has ended"));
  }
  CHECK(picture(*program.client.session) == here);
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
}

TEST_CASE("stream: whatever is damaged or missing on the way, the session goes on here") {
  const OneConnection alone;
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  uint64_t total = 0;
  {
    Between between(Between::nothing, 0);
    Next next(between.news);
    CHECK(mover.move(between.olds, NoticeType::stays).error == "the program does not reach the other worker");
    CHECK(next.report() == here + kMoved);
    total = between.passed();
  }
  REQUIRE(total > 40 * kMiB);
  const uint64_t arrays = uint64_t{300} * 70 * 8;
  // Length and bytes of the record; what follows it; a device's bytes; a digest, at the end.
  for (const uint64_t at : {uint64_t{0}, uint64_t{5}, uint64_t{300}, uint64_t{20'000}, total / 8, total / 2,
                            total - arrays - kMiB, total - arrays / 2, total - 1})
    for (const auto how : {Between::flips, Between::ends}) {
      if (at == 0 && how == Between::flips) continue;  // a few bytes more would be awaited
      CAPTURE(at, how);
      Between between(how, at);
      Next next(between.news);
      const MoveOutcome outcome = mover.move(between.olds);
      CHECK(outcome.error == (how == Between::ends ? kOtherEnded
                              : at == 5            ? "the other worker sends more than a session can be"
                                                   : kDamagedOnItsWay));
      CHECK(contains(next.report(), "not rebuilt: "));
      REQUIRE(picture(*program.client.session) == here);
    }
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
}

TEST_CASE("stream: the other worker goes or refuses at any point, and the session goes on here") {
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  std::vector<std::pair<Stop, bool>> stops;
  stops.reserve(static_cast<size_t>(Stop::none) + 4);
  for (int i = 0; i < static_cast<int>(Stop::none); ++i) stops.emplace_back(static_cast<Stop>(i), false);
  for (const Stop stop :
       {Stop::behindTheRecord, Stop::refusesAtOnce, Stop::behindTheCode, Stop::refusesTheCalls})
    stops.emplace_back(stop, true);
  for (const auto& [at, last] : stops) {
    const Stop stop = at;
    CAPTURE(static_cast<int>(stop), last);
    const auto [mine, theirs] = connection();
    std::thread other([stop, last = last, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      Playing playing{socket, stop, last, {}};
      playing.play();
      if (stop == Stop::behindAll || stop == Stop::refusesAll) CHECK(socket.error().empty());
    });
    const MoveOutcome outcome = mover.move(mine);
    other.join();
    CHECK_FALSE(outcome.error.empty());
    if (stop == Stop::refusesAtOnce) CHECK(outcome.error == "no such device here");
    if (stop == Stop::asksForOtherCode)
      CHECK(outcome.error == "the other worker asks for code that is not the session's");
    if (stop == Stop::refusesDeviceMemory) CHECK(outcome.error == "no such memory here");
    if (stop == Stop::refusesTheCalls) CHECK(outcome.error == "a texture answers another value");
    if (stop == Stop::refusesAll) CHECK(outcome.error == "an array cannot be written");
    REQUIRE(picture(*program.client.session) == here);
    program.client.session->numbers();
  }
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
}

TEST_CASE("stream: a session goes into a file and on here, and comes out of the file elsewhere") {
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  const Descriptor file(memfd_create("session", MFD_CLOEXEC));
  FileFacts facts;
  {
    const auto [mine, theirs] = connection();
    std::string said;
    std::thread writer([&, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      said = takeDown(socket, file, facts);
    });
    const MoveOutcome outcome = mover.copy(mine);
    writer.join();
    CHECK(said.empty());
    CHECK(outcome.error.empty());
    CHECK(outcome.movedBytes == 36 * kMiB);
  }
  CHECK(picture(*program.client.session) == here);
  CHECK(checkFile(file, facts) == "");
  CHECK(facts.rowsHash == schema::rowsHash());
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
  for (const bool disk : {true, false}) {
    const std::string now = picture(*program.client.session);
    const auto [mine, theirs] = connection();
    std::thread writer([&, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      FileFacts none;
      const int other = disk ? open("/dev/full", O_RDWR | O_CLOEXEC) : -1;
      takeDown(socket, other, none, {.stands = [&] { return disk ? "" : "the others do not stand still"; }});
      close(other);
    });
    const MoveOutcome outcome = mover.copy(mine);
    writer.join();
    CHECK(outcome.error ==
          (disk ? "the file cannot be written: No space left on device" : "the others do not stand still"));
    CHECK(picture(*program.client.session) == now);
    program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
  }
  const auto [mine, theirs] = connection();
  Next next(theirs);
  StateSocket socket{Descriptor(mine), [] { return false; }};
  CHECK(playBack(socket, file) == "");
  CHECK(next.report() == here + kRestored);
}

TEST_CASE("stream: a checkpoint in pages comes out of memory elsewhere, through shared memory or as bytes") {
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  const auto store = PageStore::create({[](uint64_t) { return std::string(); }, [](uint64_t) {}});
  std::shared_ptr<const KeptPages> kept;
  {
    const auto [mine, theirs] = connectionHere();
    std::thread keeper([&, theirs = theirs] {
      const Descriptor socket(theirs);
      takePages(socket, [] { return ""; }, *store, nullptr, kept);
    });
    CHECK(mover.copyPages(mine).error == "");
    keeper.join();
    REQUIRE(kept != nullptr);
    CHECK(kept->shared >= 18);  // 36 MiB
  }
  for (const bool shared : {true, false}) {
    CAPTURE(shared);
    const auto [mine, theirs] = shared ? connectionHere() : connection();
    Next next(theirs);
    StateSocket socket{Descriptor(mine), [] { return false; }};
    CHECK(playBack(socket, *kept) == "");
    CHECK(next.report() == here + kRestored);
    CHECK((socket.sharedParts() >= 3) == shared);
  }
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
}

// The program runs on, and what is free may be what it asks for next.
TEST_CASE("stream: nothing is made ahead on a device that has little memory left") {
  Program& program = theProgram();
  Mover mover(program.client);
  const std::string here = picture(*program.client.session);
  const auto [mine, theirs] = connection();
  Next next(theirs, kFullVariable);
  CHECK(mover.move(mine, NoticeType::stays).error == "the program does not reach the other worker");
  CHECK(next.report() == here + kRestored);
  program.run(ROW("sessionDrain"), Arguments().value(0).value(1));
}

// The program runs on while some of it has gone.
TEST_CASE("stream: what ends when it has gone ahead ends there, too, and what goes ahead waits for nobody") {
  Program& program = theProgram();
  Mover mover(program.client);
  Record& record = program.client.session->record();
  const auto stream = [](uint64_t number) { return makeHandle(handles::Kind::stream, 20 + number, 1); };
  const auto create = [&](uint64_t number) {
    program.run(ROW("cuStreamCreateWithPriority"), Arguments().value(stream(number)).value(1).value(0));
  };
  const size_t before = record.size();
  {
    const auto [mine, theirs] = connection();
    Next next(theirs);
    size_t went = 0;
    {
      ParallelSockets parallel([] { return false; });
      parallel.ask();  // no more: the mover has none of these
      StateSocket socket{Descriptor(fcntl(mine, F_DUPFD_CLOEXEC, 3)), [] { return false; }};
      REQUIRE(sendAhead(*program.client.session, socket, &parallel, went) == "");
    }
    // Contexts, code, its variable, the array, and the program's stream up to where a capture begins.
    CHECK(went == record.ahead());
    CHECK(went >= 7);
    program.run(ROW("cuStreamDestroy_v2"), Arguments().value(kStream));
    create(1);
    CHECK(record.size() == before + 2);
    const std::string here = picture(*program.client.session);
    CHECK(contains(here, "streams 1 "));
    CHECK(mover.move(mine, NoticeType::stays).error == "the program does not reach the other worker");
    CHECK(contains(next.report(), "streams 1 "));
  }
  // It goes on here. Its graph was captured from the stream that has ended.
  CHECK(record.ahead() == 0);
  CHECK(record.size() == before + 2);
  program.run(ROW("cuStreamDestroy_v2"), Arguments().value(stream(1)));
  program.run(ROW("cuStreamCreateWithPriority"), Arguments().value(kStream).value(1).value(0));
}

// The last one: the session leaves.
TEST_CASE("stream: a session arrives whole, with the code that the other server lacks") {
  Program& program = theProgram();
  const std::string here = picture(*program.client.session);
  const auto [mine, theirs] = connection();
  Next next(theirs);
  {
    Mover mover(program.client, true);
    const MoveOutcome outcome = mover.move(mine);
    CHECK(outcome.error.empty());
    CHECK(outcome.movedBytes == 36 * kMiB);
  }
  CHECK(next.report() == here + kMoved);
  CHECK(eventually([&] { return program.client.ended(); }));
}
