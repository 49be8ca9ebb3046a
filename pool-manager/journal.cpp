#include "pool-manager/journal.h"

#include <algorithm>
#include <stdexcept>

#include "base/log.h"

namespace gpupool::pool {
namespace {

const std::string kManagerKey = "manager", kFormatKey = "format", kFormat = "2";

const Entry* find(const std::vector<Entry>& entries, const std::string& key) {
  const auto at =
      std::find_if(entries.begin(), entries.end(), [&](const Entry& one) { return one.key == key; });
  return at == entries.end() ? nullptr : &*at;
}

}  // namespace

Journal::Journal(Store& store, const std::string& mark, std::function<void()> superseded)
    : store_(store), onSuperseded_(std::move(superseded)), alive_(std::make_shared<Journal*>(this)) {
  const auto entries = store.range("");
  const Entry* format = find(entries, kFormatKey);
  used_ = !entries.empty();
  if (used_ && (format == nullptr || format->value != kFormat))
    throw std::runtime_error("store: it was written by another version of gpupool (format " +
                             (format == nullptr ? "1" : format->value) + ", this one has format " + kFormat +
                             "): end all leases with that version and give this one a new file");
  const Entry* manager = find(entries, kManagerKey);
  const Transaction takeOver{{{kManagerKey, manager == nullptr ? 0 : manager->revision}},
                             {{kManagerKey, mark}, {kFormatKey, kFormat}}};
  const Outcome outcome = store.commitNow(takeOver);
  if (outcome.kind == Outcome::Kind::compareFailed)
    throw std::runtime_error("store: another gpupool-manager takes it over at this moment");
  if (!outcome.committed()) throw std::runtime_error(outcome.why);
  fence_ = {kManagerKey, outcome.revision};
  store.watch(kManagerKey, [alive = std::weak_ptr(alive_)](const Write&, uint64_t) {
    if (const auto self = alive.lock()) (*self)->supersede();
  });
}

Journal::~Journal() = default;

void Journal::write(std::vector<Write> writes, Done done) {
  store_.commit({{fence_}, std::move(writes)},
                [alive = std::weak_ptr(alive_), done = std::move(done)](const Outcome& outcome) {
                  if (const auto self = alive.lock()) (*self)->told(outcome, done);
                });
}

void Journal::told(const Outcome& outcome, const Done& done) {
  if (outcome.kind == Outcome::Kind::compareFailed) supersede();
  if (!outcome.committed() && !failing_ && !superseded_)
    GPUPOOL_ERROR("%s; nothing is leased, and what ends stays occupied, until it accepts writes again",
                  outcome.why.c_str());
  if (outcome.committed() && failing_) GPUPOOL_INFO("store: it accepts writes again");
  failing_ = !outcome.committed();
  done(outcome.committed() ? "" : superseded_ ? "another manager has taken over this pool" : outcome.why);
}

void Journal::supersede() {
  if (superseded_) return;
  superseded_ = true;
  GPUPOOL_ERROR("another gpupool-manager has taken over the store: this one ends");
  if (onSuperseded_) onSuperseded_();
}

}  // namespace gpupool::pool
