#include "cluster/member_view.h"

#include <algorithm>

namespace kvpool {
namespace {

Result<void> check(const std::vector<MemberInfo>& by_id) {
  if (by_id.size() > kMembersMax)
    return fail(Code::bad_argument, "a cluster has at most " + std::to_string(kMembersMax) +
                                        " members, not " + std::to_string(by_id.size()));
  for (std::size_t i = 0; i < by_id.size(); ++i) {
    if (by_id[i].weight == 0 || by_id[i].weight > kWeightMax)
      return fail(Code::bad_argument, "a member's weight is 1.." + std::to_string(kWeightMax) +
                                          ", not " + std::to_string(by_id[i].weight));
    if (i > 0 && by_id[i].id == by_id[i - 1].id)
      return fail(Code::bad_argument, "two members have one id");
  }
  if (std::ranges::count(by_id, true, &MemberInfo::is_self) > 1)
    return fail(Code::bad_argument, "two members are said to be this node");
  return {};
}

bool is_before(const Hash128& a, const Hash128& b) {
  return a.high != b.high ? a.high < b.high : a.low < b.low;
}

}  // namespace

MemberView::MemberView() : now_(std::make_shared<Snapshot>()) {}

std::shared_ptr<const MemberView::Snapshot> MemberView::now() const {
  const std::lock_guard lock(mutex_);
  return now_;
}

const MemberView::Member* MemberView::Snapshot::by_handle(MemberHandle handle) const {
  if (handle >= at.size() || at[handle] >= members.size()) return nullptr;
  return &members[at[handle]];
}

const MemberView::Member* MemberView::Snapshot::by_id(const Hash128& id) const {
  const auto found = std::ranges::lower_bound(members, id, is_before,
                                              [](const Member& member) { return member.info.id; });
  return found != members.end() && found->info.id == id ? &*found : nullptr;
}

MemberHandle MemberView::Snapshot::owner_of(const DirectoryKey& key) const {
  const std::uint16_t voter =
      owners.table == nullptr ? OwnerTable::kNobody : owners.table->owner_of(key);
  return voter < owners.handles.size() ? owners.handles[voter] : kNoMember;
}

// A new one where there is room; else that of somebody who is no member.
MemberHandle MemberView::handle_of(const Hash128& id, const std::vector<MemberInfo>& members) {
  if (const auto known = handles_.find(id); known != handles_.end()) return known->second;
  MemberHandle handle = static_cast<MemberHandle>(ids_.size());
  if (ids_.size() < kHandlesMax) {
    ids_.push_back(id);
  } else {
    const auto is_member = [&](const Hash128& old) {
      const auto found = std::ranges::lower_bound(members, old, is_before, &MemberInfo::id);
      return found != members.end() && found->id == old;
    };
    const auto gone = std::ranges::find_if_not(ids_, is_member);  // there are fewer members
    handle = static_cast<MemberHandle>(gone - ids_.begin());
    handles_.erase(*gone);
    *gone = id;
  }
  handles_.emplace(id, handle);
  return handle;
}

Result<void> MemberView::set(std::vector<MemberInfo> members) {
  std::ranges::sort(members, is_before, &MemberInfo::id);
  if (auto fits = check(members); !fits) return fits;
  const std::lock_guard setting(setting_);
  auto made = std::make_shared<Snapshot>();
  made->version = now()->version + 1;
  std::vector<Voter> voters;
  for (MemberInfo& info : members) {
    const MemberHandle handle = handle_of(info.id, members);
    if (made->at.size() <= handle) made->at.resize(handle + 1, ~std::uint32_t{0});
    made->at[handle] = static_cast<std::uint32_t>(made->members.size());
    if (info.is_self) made->self = handle;
    if (info.state == MemberState::up) voters.push_back({info.id, info.weight});
    made->members.push_back({handle, info});
  }
  const auto before = now();
  const auto same = [](const Voter& a, const Voter& b) {
    return a.id == b.id && a.weight == b.weight;
  };
  auto table = std::make_shared<const OwnerTable>(OwnerTable::build(voters));
  // The same one where nothing moved, so that whoever keeps it sees that.
  if (before->owners.table != nullptr &&
      std::ranges::equal(before->owners.table->voters(), table->voters(), same))
    table = before->owners.table;
  made->owners.table = std::move(table);
  for (const Voter& voter : made->owners.table->voters())
    made->owners.handles.push_back(handles_.at(voter.id));
  if (made->self != kNoMember) made->owners.self = made->self;
  const std::lock_guard lock(mutex_);
  now_ = std::move(made);
  return {};
}

}  // namespace kvpool
