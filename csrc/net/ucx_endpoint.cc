#include "net/ucx_endpoint.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvpool {
namespace {

// While it closes, there may be work that rings no bell.
constexpr std::chrono::milliseconds kClosingLook{1};

}  // namespace

UcxEndpoint::UcxEndpoint(UcxWorker& worker, std::shared_ptr<UcxCounters> counters)
    : worker_(worker), counters_(std::move(counters)) {
  for (Flight& flight : flights_) {
    flight.owner = this;
    idle_.push_back(&flight);
  }
}

Result<std::shared_ptr<UcxEndpoint>> UcxEndpoint::connect(UcxWorker& worker,
                                                          const UcxAddress& address,
                                                          std::shared_ptr<UcxCounters> counters) {
  std::shared_ptr<UcxEndpoint> endpoint(new UcxEndpoint(worker, std::move(counters)));
  if (!worker.admit(endpoint)) return fail(Code::no_resource, "UCX: no room for another peer");
  const ucs_status_t status = endpoint->open(address);
  if (status == UCS_OK) return endpoint;
  endpoint->begin_close();  // the worker keeps it until that is done
  return worker.library().failure(status, "connecting to a peer");
}

ucs_status_t UcxEndpoint::open(const UcxAddress& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(address.worker.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* endpoint, ucp_ep_h, ucs_status_t) {
    static_cast<UcxEndpoint*>(endpoint)->has_failed_ = true;
  };
  params.err_handler.arg = this;
  const UcxLibrary& library = worker_.library();
  ucs_status_t status = library.ucp_ep_create(worker_.handle(), &params, &handle_);
  if (status != UCS_OK) {
    handle_ = nullptr;
    return status;
  }
  for (const auto& packed : address.remote_keys) {
    ucp_rkey_h key = nullptr;
    status = library.ucp_ep_rkey_unpack(handle_, packed.data(), &key);
    if (status != UCS_OK) return status;
    keys_.push_back(key);
  }
  return UCS_OK;
}

void UcxEndpoint::start(std::shared_ptr<UcxBatch> batch) {
  if (state_ != State::open || has_failed_ || batches_.size() >= kBatchesMax)
    batch->fail_rest();
  else if (!batch->is_over())
    batches_.push_back(std::move(batch));
}

UcxGuest::Turn UcxEndpoint::turn(Time now) {
  Turn turn;
  if (state_ == State::open) {
    const bool is_late = has_late(now, turn.next);
    if (is_late) counters_->late.fetch_add(1, std::memory_order_relaxed);
    if (has_failed_) counters_->errors.fetch_add(1, std::memory_order_relaxed);
    if (is_late || has_failed_ || is_dropped_.load(std::memory_order_acquire)) {
      begin_close();
      turn.has_acted = true;
    } else {
      turn.has_acted = pump();
    }
  }
  if (state_ == State::closing) {
    if (is_close_done_ && idle_.size() == kInFlightMax) finish_close();
    turn.next = now + kClosingLook;
  }
  return turn;
}

// A peer may be late only while something is asked of it.
bool UcxEndpoint::has_late(Time now, Time& next) const {
  for (const auto& batch : batches_) next = std::min(next, batch->deadline());
  return next <= now;
}

bool UcxEndpoint::pump() {
  // Where reads are done when they are posted the others wait for no more than that.
  std::size_t posted = 0;
  for (auto at = batches_.begin(); at != batches_.end() && !idle_.empty() && !has_failed_;) {
    if (posted == kInFlightMax) break;
    if (!(*at)->has_next()) {
      ++at;
      continue;
    }
    Flight& flight = *idle_.back();
    idle_.pop_back();
    flight.batch = *at;
    flight.piece = (*at)->take_next();
    post(flight);
    ++posted;
  }
  std::erase_if(batches_, [](const auto& batch) { return batch->is_over(); });
  return posted > 0;
}

void UcxEndpoint::post(Flight& flight) {
  const UcxPiece& piece = flight.batch->piece(flight.piece);
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  params.cb.send = [](void* request, ucs_status_t status, void* user) {
    auto* const landed = static_cast<Flight*>(user);
    landed->owner->worker_.library().ucp_request_free(request);
    landed->owner->land(*landed, status);
  };
  params.user_data = &flight;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  void* const request = worker_.library().ucp_get_nbx(handle_, piece.into, piece.bytes,
                                                      piece.remote, keys_[piece.chunk], &params);
  if (!UCS_PTR_IS_PTR(request)) land(flight, UCS_PTR_STATUS(request));
}

void UcxEndpoint::land(Flight& flight, ucs_status_t status) {
  if (status != UCS_OK) {
    has_failed_ = true;
    is_broken_.store(true, std::memory_order_release);  // before anybody is told
  }
  std::exchange(flight.batch, nullptr)->end_piece(flight.piece, status == UCS_OK);
  idle_.push_back(&flight);
}

void UcxEndpoint::fail_waiting() {
  for (const auto& batch : batches_) batch->fail_rest();
}

void UcxEndpoint::begin_close() {
  if (state_ != State::open) return;
  state_ = State::closing;
  is_broken_.store(true, std::memory_order_release);
  fail_waiting();
  if (handle_ == nullptr) {
    is_close_done_ = true;
    return;
  }
  ucp_request_param_t params{};
  params.op_attr_mask =
      UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  params.flags = UCP_EP_CLOSE_FLAG_FORCE;
  params.cb.send = [](void*, ucs_status_t, void* endpoint) {
    static_cast<UcxEndpoint*>(endpoint)->is_close_done_ = true;
  };
  params.user_data = this;
  closing_ = worker_.library().ucp_ep_close_nbx(handle_, &params);
  // At once, or not at all: either way there is nothing to wait for but the reads themselves.
  if (!UCS_PTR_IS_PTR(closing_)) {
    closing_ = nullptr;
    is_close_done_ = true;
  }
}

void UcxEndpoint::finish_close() {
  if (closing_ != nullptr) worker_.library().ucp_request_free(std::exchange(closing_, nullptr));
  for (ucp_rkey_h key : std::exchange(keys_, {})) worker_.library().ucp_rkey_destroy(key);
  batches_.clear();
  state_ = State::closed;
}

void UcxEndpoint::abandon() {
  is_broken_.store(true, std::memory_order_release);
  state_ = State::closed;
  fail_waiting();
  for (Flight& flight : flights_)
    if (flight.batch != nullptr) land(flight, UCS_ERR_CANCELED);
  batches_.clear();
}

}  // namespace kvpool
