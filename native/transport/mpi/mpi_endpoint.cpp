#include <dlfcn.h>
#include <netfold/transport/mpi/mpi_endpoint.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <mutex>

namespace netfold::transport::mpi {
namespace {

using fabric::Completion;
using fabric::Error;
using fabric::Registration;
using fabric::Work;

// With an MPI's own header, this fits into what Open MPI sends over TCP without a handshake. With longer messages, each
// needs a reply first: an all_reduce of 16 MB between two hosts took 1.7 times as long.
constexpr std::size_t kMessageBytes = 60 << 10;
constexpr std::size_t kInjectBytes = 128;
// Sends in progress at once, over all streams.
constexpr std::size_t kSends = 256;
// How many of the oldest receives are tested.
constexpr std::size_t kTested = 64;

class Closable {
 public:
  virtual ~Closable() = default;
  virtual void leave() = 0;
};

struct Open {
  std::mutex mutex;
  std::vector<Closable*> endpoints;
};

Open& open() {
  // Never destroyed: endpoints of a dying process may still be closed.
  static auto* all = new Open;
  return *all;
}

// Handle: the type of this MPI's communicators, datatypes and requests.
template <class Handle>
struct Calls {
  int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
  int (*testsome)(int, Handle*, int*, int*, void*);
  int (*get_count)(const void*, Handle, int*);
  int (*cancel)(Handle*);
  int (*request_free)(Handle*);
  int (*error_string)(int, char*, int*);
  int (*finalized)(int*);

  explicit Calls(const std::string& module) {
    void* library = dlopen(module.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) throw Error("mpi4py's " + module + " is not loaded: " + dlerror());
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
      if (function == nullptr) throw Error(std::string("this process's MPI has no ") + name + ": " + dlerror());
    };
    find(isend, "MPI_Isend");
    find(irecv, "MPI_Irecv");
    find(testsome, "MPI_Testsome");
    find(get_count, "MPI_Get_count");
    find(cancel, "MPI_Cancel");
    find(request_free, "MPI_Request_free");
    find(error_string, "MPI_Error_string");
    find(finalized, "MPI_Finalized");
  }
};

template <class Handle>
class MpiEndpoint final : public fabric::Endpoint, public Closable {
 public:
  explicit MpiEndpoint(const MpiHandles& handles)
      : handles_(handles), calls_(handles.module), comm_(as_handle(handles.comm)), byte_(as_handle(handles.byte)) {
    limits_.provider = "mpi";
    limits_.version = handles.version;
    limits_.domain = "MPI";
    limits_.message_bytes = kMessageBytes;
    limits_.inject_bytes = kInjectBytes;
    limits_.sends = kSends;
    limits_.receives = std::numeric_limits<std::size_t>::max();
    limits_.tag_bits = std::bit_width(static_cast<unsigned>(handles.max_tag) + 1) - 1;
    limits_.is_private = true;
    statuses_.resize(std::max(kSends, kTested) * handles.status_bytes);
    notes_.reserve(kSends);
    std::lock_guard lock(open().mutex);
    open().endpoints.push_back(this);
  }

  ~MpiEndpoint() override {
    {
      std::lock_guard lock(open().mutex);
      std::erase(open().endpoints, this);
    }
    leave();
  }

  const Limits& limits() const override { return limits_; }

  std::vector<std::byte> name() const override {
    std::vector<std::byte> name(sizeof handles_.rank);
    std::memcpy(name.data(), &handles_.rank, name.size());
    return name;
  }

  Peer add(std::span<const std::byte> name) override {
    int rank = -1;
    if (name.size() == sizeof rank) std::memcpy(&rank, name.data(), sizeof rank);
    if (rank < 0) throw Error("the other rank's address is no rank of MPI");
    return static_cast<Peer>(rank);
  }

  std::unique_ptr<Registration> register_memory(std::byte*, std::size_t, fabric::Access) override {
    throw Error("MPI registers memory itself");
  }

  // MPI's own writes need windows that all ranks make together, which netfold does not do.
  Taken write(Peer, const std::byte*, std::size_t, void*, const RemoteBuffer&, std::uint32_t, Work*) override {
    why_ = "over MPI netfold sends messages only";
    return Taken::never;
  }

  Taken send(Peer to, const std::byte* data, std::size_t bytes, void*, std::uint64_t tag, Work* work) override {
    std::lock_guard lock(mutex_);
    return send(to, data, bytes, tag, {.work = work, .copy = nullptr});
  }

  Taken inject(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag) override {
    std::lock_guard lock(mutex_);
    if (sends_.size() == kSends) return Taken::later;
    std::unique_ptr<Copy> copy = std::make_unique<Copy>();
    std::memcpy(copy->data(), data, bytes);
    const std::byte* from = copy->data();
    return send(to, from, bytes, tag, {.work = nullptr, .copy = std::move(copy)});
  }

  Taken receive(std::byte* into, std::size_t bytes, void*, Work* work) override {
    std::lock_guard lock(mutex_);
    if (has_left_) return refuse(kLeft);
    Handle request{};
    const int code =
        calls_.irecv(into, static_cast<int>(bytes), byte_, handles_.any_source, handles_.any_tag, comm_, &request);
    if (code != 0) return refuse("MPI_Irecv: " + text_of(code));
    if (tested_.size() < kTested) {
      tested_.push_back(request);
      tested_works_.push_back(work);
    } else {
      posted_.emplace_back(request, work);
    }
    return Taken::yes;
  }

  const std::string& why() const override { return why_; }

  std::size_t poll(std::span<Completion> into) override {
    std::lock_guard lock(mutex_);
    if (has_left_) return 0;
    std::size_t found = take_received(into);
    if (!sends_.empty()) found += take_sent(into.subspan(found));
    return found;
  }

  bool may_sleep() override { return true; }
  int wait_fd() const override { return -1; }

  void leave() override {
    std::lock_guard lock(mutex_);
    if (has_left_) return;
    has_left_ = true;
    int is_over = 1;
    if (calls_.finalized(&is_over) != 0 || is_over != 0) return;
    const auto cancel = [&](Handle request) {
      calls_.cancel(&request);
      calls_.request_free(&request);
    };
    for (Handle request : tested_) cancel(request);
    for (auto& [request, work] : posted_) cancel(request);
    // MPI keeps the sends that peers have not received, so their memory is not freed.
    for (Handle request : sends_) calls_.request_free(&request);
    for (Note& note : notes_) static_cast<void>(note.copy.release());
  }

 private:
  using Copy = std::array<std::byte, kInjectBytes>;
  static constexpr const char* kLeft = "this process is about to end its MPI";
  static constexpr const char* kUnknown = "an error that MPI does not describe";

  // The owner of a send's memory: the caller, or this endpoint for an injected message.
  struct Note {
    Work* work = nullptr;
    std::unique_ptr<Copy> copy;
  };

  static Handle as_handle(std::uint64_t value) {
    if constexpr (std::is_pointer_v<Handle>) {
      return reinterpret_cast<Handle>(value);
    } else {
      return static_cast<Handle>(value);
    }
  }

  Taken refuse(std::string why) {
    why_ = std::move(why);
    return Taken::never;
  }

  Taken send(Peer to, const std::byte* data, std::size_t bytes, std::uint64_t tag, Note note) {
    if (has_left_) return refuse(kLeft);
    if (sends_.size() == kSends) return Taken::later;
    Handle request{};
    const int code = calls_.isend(data, static_cast<int>(bytes), byte_, static_cast<int>(to), static_cast<int>(tag),
                                  comm_, &request);
    if (code != 0) return refuse("MPI_Isend: " + text_of(code));
    sends_.push_back(request);
    notes_.push_back(std::move(note));
    return Taken::yes;
  }

  int in_status(int number, std::size_t at) const {
    int value = 0;
    std::memcpy(&value, statuses_.data() + static_cast<std::size_t>(number) * handles_.status_bytes + at, sizeof value);
    return value;
  }

  // Tests the first `most` requests; returns how many are complete. done_ holds their indices, statuses_ their statuses
  // in the same order, and `code` MPI's result.
  int test(std::vector<Handle>& requests, std::size_t most, int* code) {
    int count = 0;
    const auto tested = static_cast<int>(std::min(requests.size(), most));
    *code = tested == 0 ? 0 : calls_.testsome(tested, requests.data(), &count, done_.data(), statuses_.data());
    return std::max(count, 0);  // MPI_UNDEFINED is negative
  }

  // The error of the number-th completed request; 0: none.
  int error_of(int number, int code) const {
    return code == 0 ? 0 : code == handles_.error_in_status ? in_status(number, handles_.error_at) : code;
  }

  std::size_t take_received(std::span<Completion> into) {
    int code = 0;
    const int count = test(tested_, into.size(), &code);
    for (int i = 0; i < count; ++i) {
      Completion& completion = into[static_cast<std::size_t>(i)];
      completion = {.kind = Completion::Kind::received, .work = tested_works_[static_cast<std::size_t>(done_[i])]};
      if (const int error = error_of(i, code); error != 0) {
        completion.kind = Completion::Kind::failed;
        completion.why = "MPI_Irecv: " + text_of(error);
        continue;
      }
      int bytes = 0;
      calls_.get_count(statuses_.data() + static_cast<std::size_t>(i) * handles_.status_bytes, byte_, &bytes);
      completion.bytes = static_cast<std::size_t>(bytes);
      completion.tag = static_cast<std::uint64_t>(in_status(i, handles_.tag_at));
    }
    forget(count, tested_, tested_works_);
    while (tested_.size() < kTested && !posted_.empty()) {
      tested_.push_back(posted_.front().first);
      tested_works_.push_back(posted_.front().second);
      posted_.pop_front();
    }
    return static_cast<std::size_t>(count);
  }

  std::size_t take_sent(std::span<Completion> into) {
    int code = 0;
    const int count = test(sends_, into.size(), &code);
    std::size_t reported = 0;
    for (int i = 0; i < count; ++i) {
      const Note& note = notes_[static_cast<std::size_t>(done_[i])];
      const int error = error_of(i, code);
      if (note.work == nullptr && error == 0) continue;
      Completion& completion = into[reported++];
      completion = {.kind = error == 0 ? Completion::Kind::sent : Completion::Kind::failed, .work = note.work};
      if (error != 0) completion.why = "MPI_Isend: " + text_of(error);
    }
    forget(count, sends_, notes_);
    return reported;
  }

  // Removes the completed requests; the others keep their order.
  template <class Other>
  void forget(int count, std::vector<Handle>& requests, std::vector<Other>& others) {
    std::sort(done_.begin(), done_.begin() + count, std::greater<>());
    for (int i = 0; i < count; ++i) {
      requests.erase(requests.begin() + done_[i]);
      others.erase(others.begin() + done_[i]);
    }
  }

  std::string text_of(int code) const {
    std::string text(static_cast<std::size_t>(handles_.max_error_text) + 1, '\0');
    int length = 0;
    if (calls_.error_string(code, text.data(), &length) != 0) return kUnknown;
    text.resize(static_cast<std::size_t>(length));
    std::replace(text.begin(), text.end(), '\n', ' ');
    return text;
  }

  const MpiHandles handles_;
  const Calls<Handle> calls_;
  const Handle comm_;
  const Handle byte_;
  Limits limits_;
  std::mutex mutex_;  // leave() is called by another thread than the rest
  bool has_left_ = false;
  std::string why_;

  std::vector<Handle> tested_;  // the oldest receives
  std::vector<Work*> tested_works_;
  std::deque<std::pair<Handle, Work*>> posted_;  // the later receives
  std::vector<Handle> sends_;
  std::vector<Note> notes_;
  std::array<int, std::max(kSends, kTested)> done_{};
  std::vector<std::byte> statuses_;
};

}  // namespace

std::unique_ptr<fabric::Endpoint> open_endpoint(const MpiHandles& handles) {
  if (handles.handle_bytes == sizeof(int)) return std::make_unique<MpiEndpoint<int>>(handles);
  if (handles.handle_bytes == sizeof(void*)) return std::make_unique<MpiEndpoint<void*>>(handles);
  throw Error("this process's MPI has handles of " + std::to_string(handles.handle_bytes) + " bytes; expected 4 or 8");
}

void leave() {
  std::lock_guard lock(open().mutex);
  for (Closable* endpoint : open().endpoints) endpoint->leave();
}

}  // namespace netfold::transport::mpi
