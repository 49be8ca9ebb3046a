#pragma once
// What NVML says of a lease's devices, for the programs of the lease: asked of its server when a program
// asks, over a connection of its own that stays open between two questions. Programs that ask at once share
// the answer. Belongs to the holder's event loop.

#include <kj/async-io.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "pool-manager/model.h"
#include "schema/holder.h"

namespace gpupool::cli {

class FiguresSource {
 public:
  struct Settings {
    std::string transport;  // as SessionWish's: which of the server's addresses is used
    kj::Duration askBound = 2 * kj::SECONDS;
  };
  FiguresSource(kj::AsyncIoProvider& io, Settings settings) : io_(io), settings_(std::move(settings)) {}

  // Resolves when the latest figures are young and no older than `age`, or what the server says of that age
  // has just been heard; within askBound. Fails, saying why, if the server does not answer. `lease` is
  // copied.
  kj::Promise<void> refresh(const pool::Lease& lease, kj::Duration age);
  // The answer to a program (schema/holder.h): `text` says why, where the status is not ok. With a device's
  // latest figures, where there are some.
  std::string datagram(const holder::FiguresRequest& request, holder::Status status,
                       const std::string& text) const;

 private:
  // What was heard last. The bytes of a device are schema/nvml_figures.h's, and are not looked into here.
  struct Figures {
    std::vector<std::string> devices;
    kj::TimePoint taken = kj::origin<kj::TimePoint>();
  };
  kj::Duration ageOfLatest() const { return io_.getTimer().now() - latest_.taken; }
  kj::Promise<void> connect(const pool::Lease& lease);
  kj::Promise<void> ask(uint32_t maxAgeMs);

  kj::AsyncIoProvider& io_;
  Settings settings_;
  kj::Own<kj::AsyncIoStream> stream_;  // null: to be connected
  std::optional<pool::ServerLife> where_;
  Figures latest_;
  kj::Maybe<kj::ForkedPromise<void>> asking_;  // the last question
  bool settled_ = true;                        // it has been answered, or has failed
  kj::Duration askedAge_ = 0 * kj::SECONDS;    // of it
};

}  // namespace gpupool::cli
