// The client's side of the lease holder's protocol.
#include "client/holder.h"

#include <sys/socket.h>
#include <unistd.h>

#include <thread>

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
