// What a session is in the middle of when it is to move: it moves, or goes on here with the reason.
#include <sys/mman.h>
#include <sys/socket.h>

#include "server/files/session_file.h"
#include "server/worker/tests/mover.h"

using namespace gpupool;
using namespace gpupool::server;
using namespace gpupool::server::test;

#define ROW(name) schema::RowOf<name>::id

namespace {

constexpr auto kSoon = 500ms;  // for who never comes: less, and on a busy machine others do not come either

constexpr uint64_t kOther = makeHandle(handles::Kind::stream, 2, 1);
constexpr uint64_t kModule = makeHandle(handles::Kind::module, 1, 1);
// prints: each thread its number; faults.
constexpr char kCode[] = R"(.version 9.0
.target sm_75
.address_size 64
.extern .func (.param .b32 result) vprintf (.param .b64 format, .param .b64 values);
.global .align 1 .b8 text[12] = {116, 104, 114, 101, 97, 100, 32, 37, 100, 10, 0, 0};
.visible .entry prints() {
  .local .align 8 .b8 room[8];
  .reg .b32 %r<3>;
  .reg .b64 %d<4>;
  mov.u32 %r1, %tid.x;
  mov.u64 %d1, room;
  cvta.local.u64 %d2, %d1;
  st.local.u32 [%d1], %r1;
  mov.u64 %d3, text;
  cvta.global.u64 %d3, %d3;
  {
    .param .b64 format;
    .param .b64 values;
    .param .b32 result;
    st.param.b64 [format], %d3;
    st.param.b64 [values], %d2;
    call.uni (result), vprintf, (format, values);
    ld.param.b32 %r2, [result];
  }
  ret;
}
.visible .entry faults() {
  trap;
  ret;
}
)";

// A session with two streams.
struct Moving {
  Moving() : client(softDriver(), nullptr, -1, &overNetwork), mover(client) {
    client.open();
    for (const uint64_t stream : {kStream, kOther})
      run(ROW("cuStreamCreateWithPriority"), Arguments().value(stream).value(1).value(0));
  }
  void run(uint32_t row, const Arguments& arguments) {
    REQUIRE(client.await(row, arguments).status() == CUDA_SUCCESS);
  }
  // A host function of the program is next on the stream, and has begun.
  void beginHostFunction() { test::beginHostFunction(client); }
  void endHostFunction() { test::endHostFunction(client); }
  // The stream waits until the word at the address that this returns is 1. `write` writes it.
  uint64_t waitForWord() {
    const uint64_t word = client.space().deviceBase + 4 * kMiB;
    run(ROW("sessionExtentMap"), Arguments().value(0).value(word).value(2 * kMiB));
    run(ROW("cuMemsetD32Async"), Arguments().value(word).value(0).value(1).value(kOther));
    run(ROW("sessionDrain"), Arguments().value(0).value(1));
    client.post(ROW("cuStreamWaitValue32_v2"),
                Arguments().value(kStream).value(word).value(1).value(CU_STREAM_WAIT_VALUE_EQ));
    return word;
  }
  void write(uint64_t word, uint32_t value) {
    client.post(ROW("cuMemsetD32Async"), Arguments().value(word).value(value).value(1).value(kOther));
  }
  // Past the frames: who launches has a stream, and no reply to wait for.
  void launch(const char* kernel, unsigned threads) {
    CUmodule module = nullptr;
    CUstream stream = nullptr;
    CUfunction function = nullptr;
    client.session->makeAnyCurrent();
    REQUIRE(softDriver().cuModuleLoadData(&module, kCode) == CUDA_SUCCESS);
    REQUIRE(softDriver().cuModuleGetFunction(&function, module, kernel) == CUDA_SUCCESS);
    REQUIRE(client.session->objects().find(kStream, stream));
    REQUIRE(softDriver().cuLaunchKernel(function, 1, 1, 1, threads, 1, 1, 0, stream, nullptr, nullptr) ==
            CUDA_SUCCESS);
    softDriver().cuCtxSetCurrent(nullptr);
  }
  // What becomes of a copy of it into a file. stopped: as Course has it.
  std::string copy(std::chrono::milliseconds drain = kLong, std::function<void()> stopped = {}) {
    const Descriptor file(memfd_create("session", MFD_CLOEXEC));
    const auto [mine, theirs] = connection();
    std::string why;
    std::thread taker([&, theirs = theirs] {
      StateSocket socket{Descriptor(theirs), [] { return false; }};
      FileFacts facts;
      takeDown(socket, file, facts);
    });
    Course course(client, NoticeType::left, std::move(stopped), stepped);
    mover.beginCopy(mine, drain);
    why = mover.outcome().error;
    printed = course.printed();
    taker.join();
    return why;
  }
  bool goesOn() {
    return client.await(ROW("sessionImageOffer"), Arguments().structure(schema::ImageName{}).value(1))
               .status() == CUDA_SUCCESS;
  }

  Client client;
  Mover mover;
  std::string printed;
  std::function<void()> stepped;  // as Course has it
};

}  // namespace

TEST_CASE("moving: a stream that waits for a frame not yet sent keeps the session here") {
  Moving moving;
  const uint64_t word = moving.waitForWord();
  for (int round = 0; round < 2; ++round) {
    const std::string why = moving.copy(kSoon);
    CHECK(contains(why, "busy"));
    CHECK(contains(why, "1 stream has work"));
    CHECK(moving.goesOn());
  }
  moving.write(word, 1);
  CHECK(moving.copy() == "");
  CHECK(moving.goesOn());
}

TEST_CASE("moving: a stream that waits for a frame that comes when the client is asked for one") {
  Moving moving;
  const uint64_t word = moving.waitForWord();
  unsigned steps = 0;
  // The first brings nothing, and the second not what is waited for.
  moving.stepped = [&] {
    if (++steps == 2) moving.write(word, 2);
    if (steps == 3) moving.write(word, 1);
  };
  CHECK(moving.copy() == "");
  CHECK(steps >= 3);
  CHECK(moving.goesOn());
}

TEST_CASE("moving: a host function under way is waited for") {
  Moving moving;
  moving.beginHostFunction();
  CHECK(contains(moving.copy(kSoon), "1 host function of the program runs"));
  CHECK(moving.goesOn());
  // The program answers for it when it has stopped already.
  CHECK(moving.copy(kLong, [&] { moving.endHostFunction(); }) == "");
  CHECK(moving.goesOn());
}

TEST_CASE("moving: what kernels have printed and nobody has fetched goes to the program first") {
  Moving moving;
  const int kept = dup(STDOUT_FILENO);
  std::fflush(stdout);
  dup2(moving.client.output(), STDOUT_FILENO);
  moving.launch("prints", 3);
  const std::string why = moving.copy();
  std::fflush(stdout);
  dup2(kept, STDOUT_FILENO);
  close(kept);
  CHECK(why == "");
  CHECK(moving.printed == "thread 0\nthread 1\nthread 2\n");
  CHECK(moving.copy() == "");
  CHECK(moving.printed.empty());  // once
}

TEST_CASE("moving: a client that has left hears nothing of the end of the worker that it left") {
  Moving moving;
  Client& client = moving.client;
  const Descriptor file(memfd_create("session", MFD_CLOEXEC));
  const auto [mine, theirs] = connection();
  std::thread taker([&, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    FileFacts facts;
    takeDown(socket, file, facts);
  });
  // As when a lease that has moved is ended here before this worker has come to its own end.
  moving.mover.whenReported([&] { client.session->stop("the lease has ended: its sessions have moved"); });
  CHECK(moving.mover.hold(mine).error == "");
  taker.join();
  for (auto message = client.wire->receive(Channel::control, within(0)); !message.empty();
       message = client.wire->receive(Channel::control, within(0))) {
    REQUIRE(message.size() >= sizeof(Notice));
    Notice header;
    std::memcpy(&header, message.data(), sizeof header);
    CHECK(header.type != NoticeType::failed);
  }
  CHECK(client.session->clientLeft());
}

TEST_CASE(
    "moving: a session that is in its file when its server dies goes there, or on, as the next one says") {
  const bool held = GENERATE(false, true);
  Moving moving;
  CHECK_FALSE(moving.mover.decided(true));  // it is not on its way
  const Descriptor file(memfd_create("session", MFD_CLOEXEC));
  const auto [mine, theirs] = connection();
  std::thread taker([&, theirs = theirs] {
    StateSocket socket{Descriptor(theirs), [] { return false; }};
    FileFacts facts;
    takeDown(socket, file, facts, {.written = [&] {
               shutdown(theirs, SHUT_RDWR);
               return "";
             }});
  });
  Course course(moving.client);
  moving.mover.beginHold(mine);
  taker.join();
  CHECK(moving.mover.apart() == "");
  CHECK_FALSE(moving.client.session->clientLeft());
  CHECK(moving.mover.decided(held));
  const MoveOutcome outcome = moving.mover.outcome();
  course.isOver();
  CHECK(outcome.error.empty() == held);
  CHECK(moving.client.session->clientLeft() == held);
  if (!held) CHECK(moving.goesOn());
}

// The last one: the fault is the device's primary context's, which all sessions of this process have.
TEST_CASE("moving: a launch that faults while the device is waited for keeps the session here") {
  Moving moving;
  moving.beginHostFunction();
  moving.launch("faults", 1);
  CHECK(contains(moving.copy(kLong, [&] { moving.endHostFunction(); }),
                 "its GPU reports a fault: CUDA_ERROR_LAUNCH_FAILED"));
  CHECK(moving.goesOn());
  const Answer drained = moving.client.await(ROW("sessionDrain"), Arguments().value(0).value(1));
  CHECK(drained.status() == CUDA_ERROR_LAUNCH_FAILED);
}
