#include "server/worker/record.h"

#include <algorithm>

namespace gpupool::server {
namespace {

// What the driver ends with the context that it was made in.
bool endsWithContext(uint64_t name) {
  switch (handles::kindOf(name)) {
    case handles::Kind::stream:
    case handles::Kind::event:
    case handles::Kind::module:
    case handles::Kind::array:
    case handles::Kind::mipmap:
    case handles::Kind::linkState:
    case handles::Kind::greenContext:
      return true;
    default:
      return name >> 60 == 1 || name >> 60 == 2;  // textures, surfaces
  }
}

bool isCodeOrArray(uint64_t name) {
  switch (handles::kindOf(name)) {
    case handles::Kind::module:
    case handles::Kind::library:
    case handles::Kind::function:
    case handles::Kind::kernel:
    case handles::Kind::array:
    case handles::Kind::mipmap:
      return true;
    default:
      return false;
  }
}

constexpr size_t kLookBack = 8;  // settings that are looked at again when a new one comes

// No call with another key sets what one with this subject has set: to say it again says nothing. What a node
// of a graph is, updates of the whole change, too.
bool setOnlySo(uint64_t name) {
  switch (handles::kindOf(name)) {
    case handles::Kind::graph:
    case handles::Kind::graphNode:
    case handles::Kind::graphExec:
      return false;
    default:
      return name >> 60 != 3;  // captures
  }
}

}  // namespace

size_t Record::weight(const Entry& entry) {
  return sizeof(Node) + entry.arguments.size() + entry.outputs.size() + entry.names.size() * sizeof(uint64_t);
}

// An object that nobody has made (a device's, a context of before the record) is there when it is first
// named.
Record::Life Record::find(uint64_t name) {
  if (name == 0) return nullptr;
  Life& life = objects_[name];
  if (life == nullptr) {
    life = std::make_shared<Object>();
    life->names.push_back(name);
  }
  return life;
}

Record::Log::iterator Record::append(Entry entry, const Life& subject, const std::vector<uint64_t>& uses) {
  bytes_ += weight(entry);
  Node& node = log_.emplace_back();
  node.position = ++positions_;
  node.entry = std::move(entry);
  node.subject = subject;
  for (const uint64_t name : uses) {
    Life used = find(name);
    if (used == nullptr || used == subject ||
        std::find(node.uses.begin(), node.uses.end(), used) != node.uses.end())
      continue;
    ++used->users;
    used->usedAt.insert(used->usedAt.end(), node.position);
    node.uses.push_back(std::move(used));
  }
  const auto last = std::prev(log_.end());
  if (subject != nullptr) subject->entries.push_back(last);
  return last;
}

// False: the entry is not to be kept, for an earlier one says the same. Earlier ones go, but for those behind
// which something that is kept has used their subject before the next one: an exec, say, that was made from
// what they had set.
bool Record::replace(const Entry& entry, const Deed& deed, const Life& subject,
                     std::pair<uint64_t, uint64_t> key) {
  const auto found = keyed_.find(key);
  if (found == keyed_.end()) return true;
  const Log::iterator latest = found->second.back();
  if (latest->subject != subject) {  // of what had the name before
    for (const Log::iterator node : found->second) node->key = {};
    keyed_.erase(found);
    return true;
  }
  if (deed.kept == Deed::Kept::first) return false;
  if (setOnlySo(deed.subject) && latest->entry.arguments == entry.arguments) return false;
  std::vector<Log::iterator> gone;
  uint64_t until = positions_ + 1;
  const auto& earlier = found->second;
  for (size_t back = 1; back <= std::min<size_t>(earlier.size(), kLookBack); ++back) {
    const Log::iterator node = earlier[earlier.size() - back];
    if (hasGone(*node) || (subject != nullptr && subject->usedBetween(node->position, until)))
      until = node->position;
    else
      gone.push_back(node);
  }
  std::vector<Life> unused;
  for (const Log::iterator node : gone) {
    if (subject != nullptr) std::erase(subject->entries, node);
    erase(node, unused);
  }
  for (const Life& object : unused) dropIfUnused(object);
  return true;
}

void Record::add(Entry entry, const Deed& deed) {
  std::lock_guard lock(mutex_);
  if (deed.creates && objects_.contains(deed.subject)) {
    // A handle that is given again. A primary context keeps its own: who retains it once more adds nothing.
    if (handles::kindOf(deed.subject) == handles::Kind::context && objects_[deed.subject]->alive) return;
    die(Life(objects_[deed.subject]));
  }
  // It has ended with its context, while the driver was still asked to end it.
  if (deed.ends && !deed.creates && deed.subject != 0 && !objects_.contains(deed.subject)) return;
  const Life subject = find(deed.subject);
  const std::pair<uint64_t, uint64_t> key{deed.key, deed.subject};
  const bool keyed = deed.kept != Deed::Kept::always;
  if (keyed && !replace(entry, deed, subject, key)) return;
  std::vector<uint64_t> uses = deed.uses;
  uses.push_back(entry.frame.context);
  const uint64_t context = entry.frame.context;
  const auto node = append(std::move(entry), subject, uses);
  if (isCodeOrArray(deed.subject)) ++changes_;
  if (keyed) {
    node->key = key;
    keyed_[key].push_back(node);
  }
  if (subject == nullptr) return;
  subject->placed |= deed.placed;
  for (const uint64_t name : deed.aliases) {
    objects_[name] = subject;
    subject->names.push_back(name);
  }
  if (deed.creates && context != 0 && endsWithContext(deed.subject)) hold(*find(context), subject);
  if (deed.ends) die(subject);
}

void Record::hold(Object& context, const Life& made) {
  context.within.push_back(made);
  if (context.within.size() < context.lookAgain) return;
  std::erase_if(context.within, [](const auto& inside) {
    const Life object = inside.lock();
    return object == nullptr || !object->alive;
  });
  context.lookAgain = std::max<size_t>(64, 2 * context.within.size());
}

void Record::forgetNames(const Life& object) {
  for (const uint64_t name : object->names)
    if (const auto found = objects_.find(name); found != objects_.end() && found->second == object)
      objects_.erase(found);
  object->names.clear();
}

void Record::die(const Life& object) {
  if (!object->alive) return;
  object->alive = false;
  forgetNames(object);
  if (object->placed) {
    unloaded_.push_back(object);
    ++object->users;  // until it is pushed out
    if (unloaded_.size() > kMostUnloaded) {
      const Life oldest = std::move(unloaded_.front());
      unloaded_.pop_front();
      --oldest->users;
      dropIfUnused(oldest);
    }
  }
  dropIfUnused(object);
}

// One after the other: what used what may be a long chain.
void Record::dropIfUnused(const Life& object) {
  std::vector<Life> unused{object};
  while (!unused.empty()) {
    const Life next = std::move(unused.back());
    unused.pop_back();
    if (next->alive || next->users != 0 || hasGone(*next)) continue;
    forgetNames(next);
    std::vector<Log::iterator> entries = std::move(next->entries);
    next->entries.clear();
    for (const Log::iterator node : entries) erase(node, unused);
  }
}

void Record::erase(Log::iterator node, std::vector<Life>& unused) {
  if (node->key != std::pair<uint64_t, uint64_t>{}) {
    const auto found = keyed_.find(node->key);
    if (found != keyed_.end() && std::erase(found->second, node) != 0 && found->second.empty())
      keyed_.erase(found);
  }
  for (const Life& used : node->uses) {
    used->usedAt.erase(node->position);
    if (--used->users == 0) unused.push_back(used);
  }
  bytes_ -= weight(node->entry);
  log_.erase(node);
}

void Record::endContext(uint64_t context, Entry entry) {
  std::lock_guard lock(mutex_);
  const auto found = objects_.find(context);
  if (found == objects_.end()) return;
  const Life life = found->second;
  for (const auto& inside : life->within)
    if (const Life object = inside.lock()) die(object);
  life->within.clear();
  append(std::move(entry), life, {});
  ++changes_;
  die(life);
}

void Record::consume(uint64_t object) {
  std::lock_guard lock(mutex_);
  const auto found = objects_.find(object);
  if (found == objects_.end()) return;
  found->second->alive = false;  // it keeps its names: its nodes can still be set
  dropIfUnused(Life(found->second));
}

void Record::captureBegins(uint64_t stream, uint64_t capture, uint64_t frame) {
  std::lock_guard lock(mutex_);
  capturesOf_[stream] = {capture, frame};
  captures_ = capturesOf_.size();
}

uint64_t Record::captureEnds(uint64_t stream) {
  std::lock_guard lock(mutex_);
  const auto found = capturesOf_.find(stream);
  if (found == capturesOf_.end()) return 0;
  const uint64_t capture = found->second.capture;
  capturesOf_.erase(found);
  captures_ = capturesOf_.size();
  return capture;
}

uint64_t Record::captureFrame(uint64_t capture) const {
  std::lock_guard lock(mutex_);
  for (const auto& [stream, begun] : capturesOf_)
    if (begun.capture == capture) return begun.frame;
  return 0;
}

void Record::abandon(uint64_t capture) {
  std::lock_guard lock(mutex_);
  const auto found = objects_.find(capture);
  if (found != objects_.end()) die(Life(found->second));
}

void Record::alias(uint64_t name, uint64_t known) {
  std::lock_guard lock(mutex_);
  const Life life = find(known);
  if (life == nullptr) return;
  objects_[name] = life;
  life->names.push_back(name);
}

bool Record::knows(uint64_t name) const {
  std::lock_guard lock(mutex_);
  return objects_.contains(name);
}

std::vector<std::pair<uint64_t, Record::Entry>> Record::living(handles::Kind kind) const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, Entry>> all;
  for (const Node& node : log_) {
    if (node.subject == nullptr || !node.subject->alive || node.subject->names.empty()) continue;
    const uint64_t name = node.subject->names.front();
    if (handles::kindOf(name) == kind && node.subject->entries.front()->position == node.position)
      all.emplace_back(name, node.entry);
  }
  return all;
}

std::vector<std::pair<uint64_t, uint64_t>> Record::loadedCode() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<uint64_t, uint64_t>> all;
  for (const Node& node : log_) {
    if (node.subject == nullptr || !node.subject->alive || node.entry.frame.context == 0) continue;
    // Of a context that has ended, and may be there again under its name, nothing is left.
    const auto context = objects_.find(node.entry.frame.context);
    if (context == objects_.end() ||
        std::find(node.uses.begin(), node.uses.end(), context->second) == node.uses.end())
      continue;
    const uint64_t owner = node.subject->names.front();
    const handles::Kind kind = handles::kindOf(owner);
    const bool making = node.subject->entries.front()->position == node.position;
    // A library that was only made is loaded nowhere; a module is, where it was made.
    if (kind != handles::Kind::module && (kind != handles::Kind::library || making)) continue;
    const std::pair<uint64_t, uint64_t> one{owner, node.entry.frame.context};
    if (std::find(all.begin(), all.end(), one) == all.end()) all.push_back(one);
  }
  return all;
}

bool Record::hasGone(const Object& object) const {
  return !object.entries.empty() && hasGone(*object.entries.front());
}

std::vector<Record::Entry> Record::goAhead(const std::function<bool(uint32_t call)>& may) {
  std::lock_guard lock(mutex_);
  std::vector<Entry> all;
  auto node = std::next(log_.begin(), static_cast<ptrdiff_t>(ahead_));
  for (; node != log_.end() && may(node->entry.frame.call); ++node) {
    all.push_back(node->entry);
    gone_ = node->position;
  }
  ahead_ += all.size();
  return all;
}

size_t Record::ahead() const {
  std::lock_guard lock(mutex_);
  return ahead_;
}

void Record::callBack() {
  std::lock_guard lock(mutex_);
  std::vector<Life> subjects;
  for (auto node = log_.begin(); ahead_ != 0; ++node, --ahead_)
    if (node->subject != nullptr) subjects.push_back(node->subject);
  gone_ = 0;
  for (const Life& object : subjects) dropIfUnused(object);
}

size_t Record::size() const {
  std::lock_guard lock(mutex_);
  return log_.size();
}

size_t Record::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

bool Record::any(const std::function<bool(const Entry&)>& is) const {
  std::lock_guard lock(mutex_);
  return std::ranges::any_of(log_, [&](const Node& node) { return is(node.entry); });
}

std::vector<Record::Entry> Record::entries() const {
  std::lock_guard lock(mutex_);
  std::vector<Entry> all;
  all.reserve(log_.size() - ahead_);
  for (auto node = std::next(log_.begin(), static_cast<ptrdiff_t>(ahead_)); node != log_.end(); ++node)
    all.push_back(node->entry);
  return all;
}

}  // namespace gpupool::server
