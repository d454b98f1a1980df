// The way to one peer: its worker, its remote keys, and the reads that are under way.
//
// Promises:  1. a read that has not come by its deadline closes the endpoint by force, with all
//               that was asked of it; no single read can be called back;
//            2. the first error does the same at once;
//            3. a batch is over only when none of its bytes can land any more.
// An endpoint that is closed stays closed: connect to the peer again.
// Thread rule: is_broken() and drop() from any thread, the rest on the worker's.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "net/ucx_address.h"
#include "net/ucx_batch.h"
#include "net/ucx_counters.h"
#include "net/ucx_worker.h"

namespace kvpool {

class UcxEndpoint final : public UcxGuest {
 public:
  static constexpr std::size_t kInFlightMax = 64;
  static constexpr std::size_t kBatchesMax = 64;

  static Result<std::shared_ptr<UcxEndpoint>> connect(UcxWorker& worker, const UcxAddress& address,
                                                      std::shared_ptr<UcxCounters> counters);
  // Fails the batch if it cannot be begun.
  void start(std::shared_ptr<UcxBatch> batch);

  Turn turn(Time now) override;
  void begin_close() override;
  bool is_closed() const override { return state_ == State::closed; }
  void abandon() override;

  bool is_broken() const { return is_broken_.load(std::memory_order_acquire); }
  // Nobody reads from it any more. The worker is to be woken after it.
  void drop() { is_dropped_.store(true, std::memory_order_release); }

 private:
  enum class State : std::uint8_t { open, closing, closed };
  struct Flight {
    UcxEndpoint* owner = nullptr;
    std::shared_ptr<UcxBatch> batch;
    std::size_t piece = 0;
  };

  UcxEndpoint(UcxWorker& worker, std::shared_ptr<UcxCounters> counters);
  ucs_status_t open(const UcxAddress& address);
  bool has_late(Time now, Time& next) const;
  bool pump();
  void post(Flight& flight);
  void land(Flight& flight, ucs_status_t status);
  void fail_waiting();
  void finish_close();

  UcxWorker& worker_;  // outlives its guests
  const std::shared_ptr<UcxCounters> counters_;
  ucp_ep_h handle_ = nullptr;
  std::vector<ucp_rkey_h> keys_;
  State state_ = State::open;
  bool has_failed_ = false;
  void* closing_ = nullptr;  // the request that closes it
  bool is_close_done_ = false;
  std::deque<std::shared_ptr<UcxBatch>> batches_;  // that are not over
  std::array<Flight, kInFlightMax> flights_;
  std::vector<Flight*> idle_;
  std::atomic<bool> is_broken_{false}, is_dropped_{false};
};

}  // namespace kvpool
