// A connection that is not made, and when that is known.

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "catch.h"
#include "pace.h"
#include "pairs.h"
#include "transports/waiting.h"

using namespace gpupool::transport;
using namespace gpupool::transport::testing;

TEST_CASE("what UCX has to say is no output of the application") {
  auto [client, worker] = bootstrapSockets("ucx");
  Options options;
  options.networkDevice = "nowhere";  // UCX warns of it
  std::FILE* said = std::tmpfile();
  REQUIRE(said != nullptr);
  std::fflush(stdout);
  const int before = dup(STDOUT_FILENO);
  dup2(fileno(said), STDOUT_FILENO);
  CHECK_THROWS(acceptAs("ucx", worker, options));
  std::fflush(stdout);
  dup2(before, STDOUT_FILENO);
  ::close(before);
  ::close(client);
  CHECK(lseek(fileno(said), 0, SEEK_END) == 0);
  std::fclose(said);
}

TEST_CASE("set-up that cannot succeed ends with an error in time") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  Options options;
  options.setupTimeout = 300ms;
  {
    auto [client, worker] = bootstrapSockets(transport);
    auto start = Clock::now();
    CHECK_THROWS(acceptAs(transport, worker, options));  // nobody connects
    CHECK(Clock::now() - start < 2s * gpupool::test::busy());
    ::close(client);
  }
  {
    auto [client, worker] = bootstrapSockets(transport);
    ::close(worker);
    CHECK_THROWS(connectAs(transport, client, options));
  }
  {
    auto [client, worker] = bootstrapSockets(transport);
    const char nonsense[64] = "this is not the greeting of a gpupool worker, but something.";
    REQUIRE(write(worker, nonsense, sizeof nonsense) == sizeof nonsense);
    CHECK_THROWS(connectAs(transport, client, options));
    ::close(worker);
  }
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  CHECK_THROWS(accept("carrier-pigeon", ends[0], options));
  CHECK_THROWS(acceptAs(transport, ends[1], options));
}

TEST_CASE("a client that is stopped during its set-up has its time still") {
  auto transport = GENERATE(from_range(processTransports()));
  CAPTURE(transport);
  constexpr auto kBound = 1000ms, kStop = 700ms;
  auto [client, worker] = bootstrapSockets(transport);
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    ::close(worker);
    Options options;
    options.setupTimeout = kBound;
    bool refused = false;
    try {
      connectAs(transport, client, options);  // nobody greets
    } catch (const std::exception&) {
      refused = true;
    }
    _exit(refused ? 0 : 1);
  }
  ::close(client);
  std::this_thread::sleep_for(100ms);
  const auto stopping = Clock::now();
  kill(child, SIGSTOP);
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  if (WIFSTOPPED(status)) {  // else this process had no processor until the bound was over
    std::this_thread::sleep_for(kStop);
    const auto stopped = Clock::now() - stopping;
    kill(child, SIGCONT);
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(Clock::now() - start - stopped >= kBound - 2 * TimeLeft::kLongestStep - 50ms);
  }
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
  ::close(worker);
}
