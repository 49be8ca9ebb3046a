// The client's side of the lease holder's protocol.
#include "client/holder.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <thread>

#include "base/descriptor_passing.h"
#include "base/log.h"
#include "catch.h"

using namespace gpupool;
using namespace gpupool::client;
using std::chrono::milliseconds;

namespace {

struct Pair {
  int ends[2];
  Pair() { REQUIRE(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0); }
  ~Pair() {
    close(ends[0]);
    close(ends[1]);
  }
  void say(holder::Status status) const {
    holder::OpenReply reply;
    reply.status = status;
    if (send(ends[1], &reply, sizeof reply, 0) != ssize_t{sizeof reply}) abort();
  }
};

}  // namespace

TEST_CASE("a holder that says that it waits is waited for longer than its silence would be") {
  Pair pair;
  OpenedSession opened;
  std::string text;
  std::thread holder([&] {
    for (int i = 0; i < 5; ++i) {
      std::this_thread::sleep_for(milliseconds(600));
      pair.say(holder::Status::waiting);
    }
    pair.say(holder::Status::noDevice);
  });
  CHECK(receiveReply(pair.ends[0], opened, text, milliseconds(2500)) == CUDA_SUCCESS);
  CHECK(opened.reply.status == holder::Status::noDevice);
  holder.join();
}

TEST_CASE("a holder that says nothing is given up") {
  Pair pair;
  OpenedSession opened;
  std::string text;
  pair.say(holder::Status::waiting);
  CHECK(receiveReply(pair.ends[0], opened, text, milliseconds(1000)) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(text.find("has said nothing for 1 s") != std::string::npos);
}

TEST_CASE("what a holder waits for is said once") {
  Pair pair;
  OpenedSession opened;
  std::string text;
  int log[2];
  REQUIRE(pipe2(log, O_CLOEXEC | O_NONBLOCK) == 0);
  gpupool::log::setDescriptor(log[1]);
  holder::OpenReply reply;
  for (const auto status : {holder::Status::waiting, holder::Status::waiting, holder::Status::ok}) {
    reply.status = status;
    std::strcpy(reply.text, status == holder::Status::ok ? "" : "the lease is suspended");
    REQUIRE(send(pair.ends[1], &reply, sizeof reply, 0) == ssize_t{sizeof reply});
  }
  CHECK(receiveReply(pair.ends[0], opened, text, milliseconds(60'000)) == CUDA_SUCCESS);
  gpupool::log::setDescriptor(STDERR_FILENO);
  char said[1024] = "";
  CHECK(read(log[0], said, sizeof said - 1) > 0);
  const std::string line = said;
  CHECK(line.find("the lease is suspended") != std::string::npos);
  CHECK(line.find("the lease is suspended") == line.rfind("the lease is suspended"));
  close(log[0]);
  close(log[1]);
}

TEST_CASE("of the sockets that come with replies one is kept, and the others are closed") {
  Pair pair;
  OpenedSession opened;
  std::string text;
  int pipes[3][2];
  for (auto& pipe : pipes) REQUIRE(pipe2(pipe, O_CLOEXEC | O_NONBLOCK) == 0);
  holder::OpenReply reply;
  const auto bytes = std::as_bytes(std::span(&reply, 1));
  reply.status = holder::Status::waiting;
  REQUIRE(sendWithDescriptors(pair.ends[1], bytes, {&pipes[0][1], 1}) == ssize_t{sizeof reply});
  reply.status = holder::Status::ok;
  const int both[] = {pipes[1][1], pipes[2][1]};
  REQUIRE(sendWithDescriptors(pair.ends[1], bytes, both) == ssize_t{sizeof reply});
  for (auto& pipe : pipes) close(pipe[1]);

  CHECK(receiveReply(pair.ends[0], opened, text, milliseconds(60'000)) == CUDA_SUCCESS);
  CHECK(fcntl(opened.bootstrap, F_GETFD) == FD_CLOEXEC);
  CHECK(write(opened.bootstrap, "x", 1) == 1);
  close(opened.bootstrap);
  int written = 0;
  for (auto& pipe : pipes) {
    char byte;
    if (read(pipe[0], &byte, 1) == 1) ++written;
    CHECK(read(pipe[0], &byte, 1) == 0);  // its end: nobody has the other one
    close(pipe[0]);
  }
  CHECK(written == 1);
}

namespace {

// What a holder answers to a request for a session's next epoch.
struct MovingHolder : Pair {
  const NextEpoch wish{0x11, 0x22, 2, "shm"};
  int owed = 0;
  std::string text;
  OpenedSession opened;

  holder::OpenRequest request() const {
    holder::OpenRequest asked;
    if (recv(ends[1], &asked, sizeof asked, 0) != ssize_t{sizeof asked}) abort();
    return asked;
  }
  holder::OpenReply reply(holder::Status status) const {
    holder::OpenReply answer;
    answer.status = status;
    answer.sessionHigh = wish.sessionHigh;
    answer.sessionLow = wish.sessionLow;
    answer.epoch = wish.epoch;
    std::strcpy(answer.transport, "shm");
    std::strcpy(answer.text, status == holder::Status::ok ? "" : "no");
    return answer;
  }
  // With a socket; the other end of it.
  int give(const holder::OpenReply& answer) const {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) abort();
    if (sendWithDescriptors(ends[1], std::as_bytes(std::span(&answer, 1)), {&pair[1], 1}) < 0) abort();
    close(pair[1]);
    return pair[0];
  }
  static bool isClosed(int end) {
    char byte;
    return recv(end, &byte, 1, MSG_DONTWAIT) == 0;
  }
  CUresult ask(
      const std::function<bool()>& cancelled = [] { return false; },
      milliseconds bound = milliseconds(5000)) {
    opened = {};
    return openNextEpoch(ends[0], 0x1234, wish, opened, owed, bound, cancelled, text);
  }
};

}  // namespace

TEST_CASE("the next epoch of a session is asked for by its id and its transport") {
  MovingHolder holder;
  auto waiting = holder.reply(holder::Status::waiting);
  REQUIRE(send(holder.ends[1], &waiting, sizeof waiting, 0) == ssize_t{sizeof waiting});
  const int end = holder.give(holder.reply(holder::Status::ok));
  CHECK(holder.ask() == CUDA_SUCCESS);
  const auto asked = holder.request();
  CHECK(asked.rowsHash == 0x1234);
  CHECK(asked.sessionHigh == 0x11);
  CHECK(asked.sessionLow == 0x22);
  CHECK(asked.epoch == 2);
  CHECK(std::string(asked.transport) == "shm");
  CHECK(holder.opened.bootstrap >= 0);
  CHECK(holder.owed == 0);
  close(holder.opened.bootstrap);
  close(end);
}

TEST_CASE("a holder's answer about another session, or none, is no next epoch") {
  MovingHolder holder;
  auto answer = holder.reply(holder::Status::ok);
  SECTION("another epoch") { answer.epoch = 3; }
  SECTION("another session") { answer.sessionLow = 7; }
  SECTION("another transport") { std::strcpy(answer.transport, "ucx"); }
  SECTION("refused") { answer.status = holder::Status::serverLost; }
  SECTION("another version") { answer.version = 3; }
  const int end = holder.give(answer);
  CHECK(holder.ask() != CUDA_SUCCESS);
  CHECK_FALSE(holder.text.empty());
  CHECK(holder.opened.bootstrap < 0);
  CHECK(MovingHolder::isClosed(end));
  close(end);
}

TEST_CASE("a request that was given up is answered late, and not taken for the next one's answer") {
  MovingHolder holder;
  CHECK(holder.ask([] { return true; }) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(holder.ask([] { return false; }, milliseconds(200)) == CUDA_ERROR_DEVICE_UNAVAILABLE);
  CHECK(holder.text.find("has not answered within 200 ms") != std::string::npos);
  CHECK(holder.owed == 2);
  const int first = holder.give(holder.reply(holder::Status::ok));
  auto second = holder.reply(holder::Status::serverLost);
  REQUIRE(send(holder.ends[1], &second, sizeof second, 0) == ssize_t{sizeof second});
  const int third = holder.give(holder.reply(holder::Status::ok));
  CHECK(holder.ask() == CUDA_SUCCESS);
  CHECK(holder.owed == 0);
  CHECK(MovingHolder::isClosed(first));
  CHECK_FALSE(MovingHolder::isClosed(third));
  close(holder.opened.bootstrap);
  close(first);
  close(third);
}

// `gpupool run` starts it under the same name.
TEST_CASE("a holder that is gone is replaced by the next one of its name") {
  MovingHolder holder;
  const std::string name = "@gpupool-holder-test-" + std::to_string(getpid());
  sockaddr_un address{};
  const socklen_t size = holder::socketAddress(name.c_str(), address);
  const int listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  REQUIRE(bind(listening, reinterpret_cast<sockaddr*>(&address), size) == 0);
  REQUIRE(listen(listening, 4) == 0);
  setenv("GPUPOOL_HOLDER", name.c_str(), 1);
  const bool asked = GENERATE(false, true);  // it dies before it is asked, or while it is
  int end = -1;
  std::thread next([&] {
    if (asked) holder.request();
    close(holder.ends[1]);
    holder.ends[1] = accept4(listening, nullptr, nullptr, SOCK_CLOEXEC);
    holder.request();
    end = holder.give(holder.reply(holder::Status::ok));
  });
  while (!asked && !MovingHolder::isClosed(holder.ends[0])) {
  }
  CHECK(holder.ask() == CUDA_SUCCESS);
  next.join();
  CHECK(holder.text == "");
  CHECK(holder.owed == 0);
  CHECK(holder.opened.bootstrap >= 0);
  // And still answers.
  close(holder.opened.bootstrap);
  close(end);
  end = holder.give(holder.reply(holder::Status::ok));
  CHECK(holder.ask() == CUDA_SUCCESS);
  CHECK(holder.owed == 0);
  unsetenv("GPUPOOL_HOLDER");
  for (const int one : {holder.opened.bootstrap, end, listening}) close(one);
}

TEST_CASE("a holder that is gone opens no epoch, and does not signal") {
  MovingHolder holder;
  shutdown(holder.ends[1], SHUT_RDWR);
  CHECK(holder.ask() == CUDA_ERROR_DEVICE_UNAVAILABLE);
  int none = -1;
  CHECK(openNextEpoch(
            none, 1, holder.wish, holder.opened, holder.owed, milliseconds(100), [] { return false; },
            holder.text) == CUDA_ERROR_DEVICE_UNAVAILABLE);
}
