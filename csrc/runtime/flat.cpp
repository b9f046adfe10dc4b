#include "runtime/flat.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace zerocore {
namespace {

std::vector<int64_t> numels(const std::vector<at::Tensor>& params) {
  std::vector<int64_t> sizes;
  for (const at::Tensor& param : params) sizes.push_back(param.numel());
  return sizes;
}

// Built directly: views made by operators would share one version counter, so that writing one
// parameter would make autograd believe that all have changed.
at::Tensor make_view(const at::Tensor& buffer, int64_t offset, at::IntArrayRef sizes,
                     at::IntArrayRef strides) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(buffer.storage()), buffer.key_set(),
                                                   buffer.dtype());
  impl->set_sizes_and_strides(sizes, strides, buffer.storage_offset() + offset);
  return at::Tensor(std::move(impl));
}

c10::ScalarType shard_dtype(const at::Tensor& param, const FlatOptions& options,
                            c10::ScalarType compute_dtype) {
  const c10::ScalarType own = param.scalar_type();
  if (!param.requires_grad() || !param.is_floating_point()) return own;
  return options.master_dtype ? c10::promoteTypes(own, *options.master_dtype) : compute_dtype;
}

// Values are broadcast in pieces of this size: small enough for a cache.
constexpr int64_t kPieceBytes = 4 << 20;

const char* kRemedy =
    " now; read it inside the forward of its module, or in `with zerocore.gathered(module):`";

std::string released_message(const std::string& unit, const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
  return "zerocore: unit '" + unit + "' is sharded" + kRemedy + " (its parameters: " + list + ")";
}

// Strides of a full parameter in the flat buffer: a dense one keeps its own (channels_last stays
// so); another one becomes contiguous.
std::vector<int64_t> strides_of(const at::Tensor& param) {
  if (param.is_non_overlapping_and_dense()) return param.strides().vec();
  std::vector<int64_t> strides(param.dim());
  int64_t stride = 1;
  for (int64_t d = param.dim() - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= std::max<int64_t>(param.size(d), 1);
  }
  return strides;
}

}  // namespace

Flat::Flat(std::string unit, std::vector<std::string> names, std::vector<at::Tensor> params,
           const Values& values, const FlatOptions& options, Transport& transport,
           std::shared_ptr<DevicePool> windows, int channel)
    : unit_(std::move(unit)),
      names_(std::move(names)),
      params_(std::move(params)),
      options_(options),
      transport_(transport),
      windows_(std::move(windows)),
      channel_(channel),
      layout_(numels(params_), transport.shards(), transport.replicas()),
      compute_dtype_(params_.at(0).is_floating_point() && options.compute_dtype
                         ? *options.compute_dtype
                         : params_[0].scalar_type()),
      shard_dtype_(shard_dtype(params_[0], options, compute_dtype_)),
      shard_is_slot_(options.persistent && compute_dtype_ == shard_dtype_),
      released_message_(released_message(unit_, names_)) {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  for (int64_t i = 0; i < size(); ++i) describe(i);
  make_window();
  make_views();
  if (values) {
    take(*values);
  } else {
    fill_with_nothing();
  }
  show(View::shard);
  gathered_versions_ = versions();
}

Flat::~Flat() {
  if (!gather_ && lease_.data == nullptr) return;
  // Graphs may still hold views of the window: its memory goes only with an error in its place, and
  // not before the messages that are under way have come and gone.
  transport_.retire(
      std::move(gather_),
      [windows = windows_, lease = lease_, storage = c10::Storage(window_.storage()),
       message = released_message_, reader = reader_.value_or(windows_->streams().current())] {
        if (lease.data == nullptr) return;
        take_memory_away(storage, message);
        windows->release(lease, reader);
      });
}

void Flat::describe(int64_t i) {
  const at::Tensor& param = params_[i];
  std::vector<int64_t> strides = strides_of(param);
  std::vector<int64_t> order(param.dim());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  sizes_.push_back(param.sizes().vec());
  strides_.push_back(std::move(strides));
  memory_order_.push_back(std::move(order));
}

at::Tensor Flat::own_slot(const at::Tensor& buffer) const {
  return buffer.narrow(0, transport_.shard_rank() * layout_.shard_numel(), layout_.shard_numel());
}

void Flat::make_window() {
  const c10::Device device = windows_->streams().device();
  const auto options = at::TensorOptions().device(device);
  window_ = options_.persistent
                ? at::zeros({layout_.total()}, options.dtype(compute_dtype_))
                : without_memory(device, layout_.total(), compute_dtype_, released_message_);
  slot_ = own_slot(window_);
  shard_ = shard_is_slot_ ? slot_ : at::empty({layout_.shard_numel()}, options.dtype(shard_dtype_));
}

// The flat buffer of the originals never exists as a whole: it comes in pieces, of which each rank
// keeps what is its own.
void Flat::take(const std::vector<at::Tensor>& values) {
  const c10::ScalarType dtype = params_[0].scalar_type();
  const int64_t step = kPieceBytes / static_cast<int64_t>(c10::elementSize(dtype));
  const at::Tensor buffer =
      at::empty({std::min(step, layout_.total())}, shard_.options().dtype(dtype));
  std::vector<at::Tensor> dense;
  for (size_t i = 0; i < values.size(); ++i) {
    dense.push_back(in_memory_order(values[i], static_cast<int64_t>(i)));
  }
  const at::Tensor& kept = shard_is_slot_ ? window_ : shard_;
  const int64_t first = shard_is_slot_ ? 0 : transport_.shard_rank() * layout_.shard_numel();
  // What nobody but the first rank keeps.
  const int64_t alone =
      kept.numel() < layout_.total() && transport_.replicas() == 1 ? kept.numel() : 0;
  for (int64_t begin = 0; begin < layout_.total(); begin += step) {
    const int64_t end = std::min(begin + step, layout_.total());
    const at::Tensor piece = buffer.narrow(0, 0, end - begin);
    if (!dense.empty()) pack(dense, begin, piece);
    const int64_t from = std::max(begin, first);
    const int64_t size = std::max<int64_t>(std::min(end, first + kept.numel()) - from, 0);
    if (end > alone) transport_.broadcast(piece, {from - begin, from - begin + size});
    if (size > 0) kept.narrow(0, from - first, size).copy_(piece.narrow(0, from - begin, size));
  }
  fresh_ = shard_is_slot_;
}

// What lies from `begin` on in the flat buffer of these values, which are in memory order; padding
// is zero.
void Flat::pack(const std::vector<at::Tensor>& values, int64_t begin,
                const at::Tensor& piece) const {
  const int64_t end = begin + piece.numel();
  for (int64_t i = 0; i < size(); ++i) {
    const int64_t start = layout_.offset(i), stop = start + layout_.numel(i);
    const int64_t next = i + 1 < size() ? layout_.offset(i + 1) : layout_.total();
    if (next <= begin || start >= end) continue;
    const int64_t from = std::max(begin, start), to = std::min(end, stop);
    if (from < to) {
      const at::Tensor& value = values.at(i);
      const at::Tensor part = make_view(value, from - start, {to - from}, {1});
      piece.narrow(0, from - begin, to - from).copy_(part);
    }
    const int64_t gap = std::max(begin, stop), over = std::min(end, next);
    if (gap < over) piece.narrow(0, gap - begin, over - gap).zero_();
  }
}

void Flat::fill_with_nothing() {
  shard_.zero_();
  for (const at::Tensor& view : shard_is_slot_ ? window_views_ : shard_views_) {
    if (view.is_floating_point() || view.is_complex()) view.fill_(NAN);
  }
  fresh_ = shard_is_slot_;
}

void Flat::make_views() {
  const c10::Device device = shard_.device();
  for (int64_t i = 0; i < size(); ++i) {
    window_views_.push_back(full_view(window_, i));
    shard_views_.push_back(shard_view(shard_, i));
    const at::Tensor& own = shard_views_.back();
    places_.push_back({own.storage_offset(), at::DimVector(own.sizes())});
    if (options_.persistent && layout_.shards() == 1) continue;  // never out of reach
    // As large as the parameter: a view of it may be made, and fails only when it is read.
    const std::string message =
        "zerocore: parameter '" + names_[i] + "' of unit '" + unit_ + "' is sharded" + kRemedy;
    const at::Tensor nothing = without_memory(device, params_[i].numel(), compute_dtype_, message);
    guards_.push_back(make_view(nothing, 0, sizes_[i], strides_[i]));
  }
}

at::Tensor Flat::full_view(const at::Tensor& full, int64_t i) const {
  return make_view(full, layout_.offset(i), sizes_[i], strides_[i]);
}

std::vector<at::Tensor> Flat::clones(const at::Tensor& full) const {
  std::vector<at::Tensor> tensors;
  for (int64_t i = 0; i < size(); ++i) tensors.push_back(full_view(full, i).clone());
  return tensors;
}

at::Tensor Flat::shard_view(const at::Tensor& buffer, int64_t i) const {
  if (layout_.shards() == 1) return make_view(buffer, layout_.offset(i), sizes_[i], strides_[i]);
  const Range range = layout_.within_shard(i, transport_.shard_rank());
  // The original's number of dimensions, so that rules such as `p.dim() >= 2` still hold.
  at::DimVector sizes(sizes_[i].size(), 1);
  at::DimVector strides(sizes_[i].size(), 1);
  if (!sizes.empty()) {
    sizes[0] = range.size();
  } else if (range.size() == 0) {
    sizes = {0};
    strides = {1};
  }
  return make_view(buffer, range.begin, sizes, strides);
}

at::Tensor Flat::in_memory_order(const at::Tensor& full, int64_t i) const {
  if (full.strides().equals(strides_[i])) return full;
  return at::empty_strided(sizes_[i], strides_[i], full.options()).copy_(full);
}

at::Tensor Flat::slice(const at::Tensor& full, int64_t i) const {
  if (layout_.shards() == 1) return full;
  const Range range = layout_.owned(i, transport_.shard_rank());
  std::vector<int64_t> sizes = shard_views_[i].sizes().vec();
  std::vector<int64_t> strides(sizes.size(), 1);
  return make_view(full, range.begin, sizes, strides);
}

int64_t Flat::window_bytes() const {
  return layout_.total() * static_cast<int64_t>(c10::elementSize(compute_dtype_));
}

bool Flat::adopt_replaced() {
  if (view_ != View::shard) return false;
  at::NoGradGuard no_grad;
  const c10::StorageImpl* storage = shard_.storage().unsafeGetStorageImpl();
  bool changed = false;
  for (int64_t i = 0; i < size(); ++i) {
    const at::Tensor& param = params_[i];
    const Place& place = places_[i];
    if (param.unsafeGetTensorImpl()->storage().unsafeGetStorageImpl() == storage &&
        param.storage_offset() == place.offset && param.sizes().equals(place.sizes)) {
      continue;
    }
    const at::Tensor& own = shard_views_[i];
    TORCH_CHECK_VALUE(param.sizes() == own.sizes() && param.scalar_type() == own.scalar_type(),
                      "zerocore: the data of '", names_[i], "' was replaced: expected ",
                      own.scalar_type(), " of this rank's shape ", own.sizes(), ", got ",
                      param.scalar_type(), " of shape ", param.sizes(),
                      "; convert a model before zerocore.shard, or use mixed_precision");
    own.copy_(param);
    params_[i].unsafeGetTensorImpl()->shallow_copy_from(own.getIntrusivePtr());
    changed = true;
  }
  if (changed) {
    fresh_ = false;
    slot_versions_ = -1;
  }
  return changed;
}

void Flat::show(View view) {
  TORCH_INTERNAL_ASSERT(view != View::original, "View::original needs a buffer");
  if (view == view_) return;
  const std::vector<at::Tensor>& targets = view == View::shard    ? shard_views_
                                           : view == View::window ? window_views_
                                                                  : guards_;
  if (!options_.persistent && view_ == View::window) {
    written_ = written_ || versions() != shown_versions_;
  }
  for (int64_t i = 0; i < size(); ++i) {
    params_[i].unsafeGetTensorImpl()->shallow_copy_from(targets.at(i).getIntrusivePtr());
  }
  view_ = view;
  if (view == View::window) shown_versions_ = versions();
}

void Flat::tell_written(const std::string& params) {
  for (int64_t i = 0; i < size(); ++i) {
    c10::TensorImpl* param = params_[i].unsafeGetTensorImpl();
    if (params.at(i) && param->version_counter().enabled()) param->bump_version();
  }
}

int64_t Flat::versions() const {
  int64_t sum = 0;
  for (const at::Tensor& param : params_) {
    sum += param.unsafeGetTensorImpl()->version_counter().current_version();
  }
  return sum;
}

bool Flat::stale() const {
  if (shard_is_slot_ && layout_.shards() == 1) return false;
  return !fresh_ || versions() != gathered_versions_;
}

void Flat::invalidate() {
  fresh_ = false;
  if (!slot_kept_) slot_versions_ = -1;
}

void Flat::stepped() {
  slot_kept_ = std::exchange(slot_stepped_, false);
  invalidate();
}

at::Tensor Flat::slot() const {
  const bool cast = options_.persistent && !shard_is_slot_ && slot_versions_ == versions();
  return cast ? slot_ : at::Tensor();
}

void Flat::slot_written() {
  slot_versions_ = versions();
  slot_stepped_ = true;
}

bool Flat::start_gather() {
  at::NoGradGuard no_grad;
  const c10::Stream stream = windows_->streams().gather();
  if (!options_.persistent) {
    const std::optional<Lease> lease = windows_->try_lease(window_bytes(), stream);
    if (!lease) return false;
    lease_ = *lease;
    c10::StorageImpl* storage = window_.storage().unsafeGetStorageImpl();
    storage->set_data_ptr_noswap(c10::DataPtr(lease_.data, window_.device()));
    storage->clear_data_ptr_access_error_msg_();
  }
  const c10::StreamGuard on(stream);
  drain();
  if (!shard_is_slot_ && !slot().defined()) slot_.copy_(shard_);
  gather_ = transport_.all_gather(window_, channel_);
  gathered_versions_ = slot_versions_ = versions();
  slot_kept_ = false;
  fresh_ = true;  // once it is finished, unless the shard changes meanwhile
  return true;
}

void Flat::finish_gather() {
  try {
    if (gather_) gather_->wait();
  } catch (const std::exception&) {
    fresh_ = false;
    throw;
  }
  reader_ = windows_->streams().current();
}

void Flat::drain() {
  if (gather_) gather_->drain();
  gather_.reset();
}

bool Flat::take_written() { return std::exchange(written_, false); }

void Flat::release_window() {
  if (options_.persistent) return;
  drain();
  take_memory_away(window_.storage(), released_message_);
  Streams& streams = windows_->streams();
  if (lease_.data != nullptr) windows_->release(lease_, reader_.value_or(streams.current()));
  lease_ = {};
  reader_.reset();
  fresh_ = false;
}

at::Tensor Flat::gather_original() {
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  if (!shard_is_slot_) return gather(shard_);
  if (stale()) {
    shards_ready();
    start_gather();
  }
  finish_gather();
  return window_;
}

at::Tensor Flat::gather(const at::Tensor& part) {
  if (layout_.shards() == 1) return part;
  const at::Tensor full = at::empty({layout_.total()}, part.options());
  own_slot(full).copy_(part);
  shards_ready();
  transport_.all_gather(full, channel_ + 1)->drain();
  return full;
}

void Flat::shards_ready() const {
  Streams& streams = windows_->streams();
  streams.wait(streams.gather(), streams.here(streams.current()), Wait::shards_written);
}

void Flat::open_original(const at::Tensor& full) {
  c10::InferenceMode normal(false);
  for (int64_t i = 0; i < size(); ++i) {
    params_[i].unsafeGetTensorImpl()->shallow_copy_from(full_view(full, i).getIntrusivePtr());
  }
  view_ = View::original;
}

void Flat::close_original(const at::Tensor& full, bool write) {
  at::NoGradGuard no_grad;
  show(View::shard);
  if (!write) return;
  transport_.broadcast(full);
  if (!shard_is_slot_ && layout_.shards() > 1) shard_.copy_(own_slot(full));
  gathered_versions_ = versions();
  // Every rank holds rank 0's window now; one in another dtype is cast again from the shard.
  fresh_ = shard_is_slot_;
  slot_versions_ = -1;
}

}  // namespace zerocore
