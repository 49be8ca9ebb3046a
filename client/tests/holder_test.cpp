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
