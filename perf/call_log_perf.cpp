// What the log of calls of a protected session (client/call_log.h) costs: nanoseconds to take in a message,
// and to drop it when a checkpoint is kept. It needs no GPU.
//
//   perf-call-log [--bytes N] [--calls N] [--rounds N]
//
// A round is what lies between two checkpoints: so many kernel launches of N bytes, each hundredth followed
// by a word that was reached. Two lines: of the first round, in which the log's memory is new, and medians of
// the rounds behind the first three. Half a minute of a training that is bound by launches: --calls 1500000
// --bytes 600.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "client/call_log.h"
#include "schema/rows.h"

namespace {

using gpupool::client::CallLog;
using Clock = std::chrono::steady_clock;

long option(int argc, char** argv, const char* name, long otherwise) {
  for (int i = 1; i + 1 < argc; i += 2)
    if (std::strcmp(argv[i], name) == 0) return std::atol(argv[i + 1]);
  return otherwise;
}
double nanoseconds(Clock::duration time, long calls) {
  return std::chrono::duration<double, std::nano>(time).count() / static_cast<double>(calls);
}
double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const long bytes = std::max<long>(option(argc, argv, "--bytes", 220), sizeof(gpupool::schema::Frame));
  const long calls = std::max(option(argc, argv, "--calls", 100'000), 1L);
  const long rounds = std::max(option(argc, argv, "--rounds", 12), 4L);
  constexpr uint64_t kAmple = uint64_t{1} << 40;
  CallLog log({kAmple, kAmple});
  std::vector<std::byte> message(static_cast<size_t>(bytes));
  gpupool::schema::Frame frame;
  frame.call = gpupool::schema::RowOf<"sessionLaunch">::id;
  std::vector<double> taken, dropped;
  log.cut(0, 0);
  for (long round = 0; round < rounds; ++round) {
    const auto began = Clock::now();
    for (long i = 0; i < calls; ++i) {
      ++frame.seq;
      std::memcpy(message.data(), &frame, sizeof frame);
      log.sent(false, message, 0);
      if (frame.seq % 100 == 0) log.reached(5, frame.seq);
    }
    const auto sent = Clock::now();
    log.cut(frame.seq, 0);
    log.kept(frame.seq, 0);
    const auto kept = Clock::now();
    if (round == 0)
      std::printf("the first %ld launches of %ld bytes: %.1f ns each to take in, %.1f ns to drop\n", calls,
                  bytes, nanoseconds(sent - began, calls), nanoseconds(kept - sent, calls));
    if (round < 3) continue;
    taken.push_back(nanoseconds(sent - began, calls));
    dropped.push_back(nanoseconds(kept - sent, calls));
  }
  std::printf("later: %.1f ns each to take in, %.1f ns to drop\n", median(taken), median(dropped));
  return 0;
}
