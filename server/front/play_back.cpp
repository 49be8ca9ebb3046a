#include "server/front/play_back.h"

#include <fcntl.h>
#include <sys/socket.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "server/files/session_file.h"
#include "server/front/beside.h"

namespace gpupool::server {
namespace {

std::shared_ptr<Descriptor> ownOf(int descriptor) {
  return std::make_shared<Descriptor>(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
}

}  // namespace

std::pair<kj::AutoCloseFd, kj::AutoCloseFd> stateSocket() {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
  return {kj::AutoCloseFd(ends[0]), kj::AutoCloseFd(ends[1])};
}

kj::Promise<void> playBackTo(kj::Own<WorkerChild> worker, const SessionFacts& facts, const Grant& grant,
                             Play play, SessionTable& sessions, const WorkerStarts& starts,
                             Descriptor& state) {
  auto [workers, ours] = stateSocket();
  state = Descriptor(ours.release());
  sessions.announce(facts, worker->pid());
  if (!starts.send(*worker, facts, grant, workers, WorkerStarts::From::server)) {
    sessions.withdraw();
    return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                         kj::str("its worker died before it began"));
  }
  sessions.arrive(facts, kj::mv(worker));
  return beside<bool>([socket = ownOf(state), play = std::move(play)] {
           StateSocket ours(std::move(*socket), [] { return false; });
           if (const std::string why = play(ours); !why.empty()) throw std::runtime_error(why);
           return true;
         })
      .ignoreResult();
}

Play playOf(int file) {
  return [file = ownOf(file)](StateSocket& socket) { return playBack(socket, *file); };
}

Play playOfBeginning() {
  return [](StateSocket& socket) {
    const Digest digest = contentDigest({});
    if (!socket.sendBlock({}) || !socket.send(digest)) return socket.error();
    return socket.hearAnswer();
  };
}

}  // namespace gpupool::server
