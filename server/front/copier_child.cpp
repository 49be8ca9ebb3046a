#include "server/front/copier_child.h"

#include <capnp/message.h>
#include <sys/socket.h>

#include "base/log.h"

namespace gpupool::server {
namespace {

kj::Exception copierFailure(const std::string& text) {
  return kj::Exception(kj::Exception::Type::FAILED, __FILE__, __LINE__,
                       kj::str("the process that keeps suspended memory (copier) ", text));
}

}  // namespace

CopierChild::CopierChild(kj::UnixEventPort& port, kj::Timer& timer, Settings settings)
    : port_(port), timer_(timer), settings_(std::move(settings)), tasks_(*this) {}

std::vector<std::string> CopierChild::arguments() const {
  std::vector<std::string> words{"--copier", "--driver", settings_.driver, "--budget",
                                 std::to_string(settings_.budgetBytes)};
  if (!settings_.folder.empty()) words.insert(words.end(), {"--folder", settings_.folder});
  if (settings_.aheadBytes != 0)
    words.insert(words.end(), {"--touch-ahead", std::to_string(settings_.aheadBytes)});
  if (settings_.verify) words.push_back("--verify");
  return words;
}

void CopierChild::start() {
  auto life = kj::refcounted<Life>();
  life->child = WorkerChild::start(port_, settings_.program, arguments());
  life_ = kj::mv(life);
  ready_ = awaitReady(kj::addRef(*life_)).fork();
}

kj::Promise<void> CopierChild::awaitReady(kj::Own<Life> life) {
  auto report = timer_.timeoutAfter(settings_.startBound, life->child->receive());
  auto kept = kj::addRef(*life);
  return report
      .then(
          [this, life = kj::mv(life)](kj::Maybe<kj::Own<WorkerMessage>> maybe) mutable -> kj::Promise<void> {
            KJ_IF_MAYBE (message, maybe) {
              const auto report = (*message)->get();
              if (report.isFailed())
                return copierFailure("failed to start: " + std::string(report.getFailed().cStr()));
              if (!report.isReady()) return copierFailure("sent something else than that it is ready");
              GPUPOOL_INFO("copier %d is ready", life->child->pid());
              tasks_.add(watch(kj::mv(life)));
              return kj::READY_NOW;
            }
            // Closed its socket; its exit says why.
            auto exit = timer_.timeoutAfter(settings_.startBound, life->child->exited());
            return exit.then([life = kj::mv(life)](WorkerChild::Exit exit) -> kj::Promise<void> {
              return copierFailure("failed to start: it " + exit.text);
            });
          })
      .catch_([this, life = kj::mv(kept)](kj::Exception&& exception) mutable -> kj::Promise<void> {
        drop(*life);
        if (exception.getType() == kj::Exception::Type::OVERLOADED)
          return copierFailure("did not get ready in " + std::to_string(settings_.startBound / kj::SECONDS) +
                               " s");
        return kj::mv(exception);
      });
}

kj::Promise<void> CopierChild::watch(kj::Own<Life> life) {
  auto exit = life->child->exited();
  return exit.then([this, life = kj::mv(life)](WorkerChild::Exit exit) mutable {
    if (!stopped_)
      GPUPOOL_ERROR("copier %d %s: sessions whose memory it kept end; the next suspension starts another one",
                    life->child->pid(), exit.text.c_str());
    drop(*life);
  });
}

void CopierChild::drop(Life& life) {
  life.child->kill();
  if (life_.get() == &life) life_ = nullptr;
}

kj::Promise<kj::AutoCloseFd> CopierChild::connect() {
  return kj::evalNow([this]() -> kj::Promise<kj::AutoCloseFd> {
    if (stopped_) return copierFailure("is not started any more: the server is shutting down");
    if (life_.get() == nullptr || life_->child->gone()) start();
    return ready_.addBranch().then([this, life = kj::addRef(*life_)]() mutable { return connectTo(*life); });
  });
}

kj::AutoCloseFd CopierChild::connectTo(Life& life) {
  int ends[2];
  KJ_SYSCALL(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
  kj::AutoCloseFd theirs(ends[0]), workers(ends[1]);
  capnp::MallocMessageBuilder message;
  message.initRoot<schema::WorkerOrder>().setServe();
  const int descriptor = theirs;
  if (!life.child->send(message, std::span(&descriptor, 1)))
    kj::throwFatalException(copierFailure(life.child->gone() ? "has just died" : "takes no new session"));
  return workers;
}

void CopierChild::startAhead() {
  if (life_.get() != nullptr) return;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([this] { start(); })) {
    GPUPOOL_ERROR("%s", exception->getDescription().cStr());
    return;
  }
  tasks_.add(ready_.addBranch());
}

kj::Promise<void> CopierChild::stop() {
  stopped_ = true;
  if (life_.get() == nullptr) return kj::READY_NOW;
  auto life = kj::addRef(*life_);
  life->child->kill();
  auto exit = life->child->exited();
  return exit.then([life = kj::mv(life)](WorkerChild::Exit) {});
}

void CopierChild::taskFailed(kj::Exception&& exception) {
  GPUPOOL_ERROR("%s", exception.getDescription().cStr());
}

}  // namespace gpupool::server
