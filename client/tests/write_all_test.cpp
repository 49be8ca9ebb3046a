#include "base/write_all.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "catch.h"

namespace {

struct Pipe {
  int ends[2];
  Pipe() {
    REQUIRE(pipe(ends) == 0);
    fcntl(ends[1], F_SETPIPE_SZ, 4096);  // full most of the time
  }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  // Reads that many bytes; fewer at end-of-file.
  std::string read(size_t bytes) const {
    std::string all(bytes, '\0');
    size_t at = 0;
    while (at < bytes) {
      const ssize_t n = ::read(ends[0], all.data() + at, bytes - at);
      if (n <= 0) break;
      at += static_cast<size_t>(n);
    }
    all.resize(at);
    return all;
  }
};

std::string someText() {
  std::string text;
  while (text.size() < size_t{1} << 20) text += std::to_string(text.size()) + "\n";
  return text;
}

}  // namespace

TEST_CASE("a signal that interrupts the write costs no text") {
  struct sigaction action{};
  action.sa_handler = [](int) {};  // without SA_RESTART
  sigaction(SIGUSR1, &action, nullptr);
  Pipe pipe;
  const std::string text = someText();
  std::atomic<bool> ended{false};
  std::string got;
  bool whole = false;
  std::thread writer([&] {
    whole = gpupool::writeAll(pipe.ends[1], text);
    ended = true;
    close(pipe.ends[1]);
    while (ended) usleep(100);  // its thread stays to be signalled
  });
  // Nobody reads yet: from the second signal on the writer is interrupted before it has written a byte.
  for (int i = 0; i < 20; ++i) {
    usleep(2000);
    pthread_kill(writer.native_handle(), SIGUSR1);
  }
  std::thread reader([&] { got = pipe.read(text.size()); });
  while (!ended) {
    pthread_kill(writer.native_handle(), SIGUSR1);
    usleep(50);
  }
  ended = false;
  writer.join();
  reader.join();
  pipe.ends[1] = -1;
  CHECK(whole);
  CHECK(got == text);
}

TEST_CASE("a full descriptor that does not block is waited for") {
  Pipe pipe;
  fcntl(pipe.ends[1], F_SETFL, O_NONBLOCK);
  const std::string text = someText();
  std::string got;
  std::thread reader([&] { got = pipe.read(text.size()); });
  CHECK(gpupool::writeAll(pipe.ends[1], text, std::chrono::seconds(60)));
  reader.join();
  CHECK(got == text);
}

TEST_CASE("a reader that never reads is not waited for without end") {
  Pipe pipe;
  fcntl(pipe.ends[1], F_SETFL, O_NONBLOCK);
  CHECK_FALSE(gpupool::writeAll(pipe.ends[1], someText(), std::chrono::milliseconds(50)));
}
