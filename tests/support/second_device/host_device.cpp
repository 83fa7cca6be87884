// A device of torch whose memory is on the host, so that tests without a GPU see which device a tensor is on.
//
// Operations copy their tensors to the CPU, run there, and copy back. As on a GPU, tensors of two devices in one
// operation are an error. Addresses are shifted, so that code which reads a tensor's memory without a copy crashes.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <string>

namespace {

constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
// Beyond the addresses that a process can have.
constexpr uintptr_t SHIFT = uintptr_t{1} << 56;

void* shifted(void* pointer, uintptr_t by) {
  return pointer ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + by) : nullptr;
}

void* on_host(void* pointer) { return shifted(pointer, -SHIFT); }

c10::Device device() { return {TYPE, 0}; }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? std::aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    // As a GPU's memory, it holds anything before it is written to: here NaN, or -1.
    if (memory) std::memset(memory, 0xFF, size);
    return {shifted(memory, SHIFT), memory, std::free, device()};
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(on_host(target), on_host(const_cast<void*>(source)), size);
  }
} memory;

// All streams compute at once, so there is nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static thread_local c10::StreamId current;
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static std::atomic<c10::StreamId> last{0};
    return stream(++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = stream(current);
    current = next.id();
    return before;
  }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    *event = const_cast<Guard*>(this);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
thread_local c10::StreamId Guard::current = 0;
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    auto resized = memory.allocate(size);
    memory.copy_data(resized.get(), impl->data(), std::min(size, impl->nbytes()));
    impl->set_data_ptr_noswap(std::move(resized));
    impl->set_nbytes(size);
  }
};

const bool registered = [] {
  c10::SetAllocator(TYPE, &memory);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// The tensor itself if it is on the CPU, else a tensor on the CPU with the same memory.
at::Tensor as_cpu(const at::Tensor& tensor) {
  if (tensor.device().type() != TYPE) return tensor;
  auto options = tensor.options().device(c10::kCPU);
  return at::from_blob(on_host(tensor.data_ptr()), tensor.sizes(), tensor.strides(), options);
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(KEY),
                                           c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool) {
  as_cpu(target).copy_(as_cpu(source));
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (target.sizes() != source.sizes()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::_local_scalar_dense(as_cpu(tensor)); }

const at::Tensor& resize(const at::Tensor& tensor, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto needed = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
  if (needed > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), needed);
  return at::native::resize_(tensor, size, format);
}

// As for a GPU: `module.to(device)` keeps its parameters and gives them new data.
bool may_take_data_of(const at::Tensor& tensor, const at::Tensor& other) {
  const auto is_plain = [](const at::Tensor& each) { return each.layout() == at::kStrided && !each.is_meta(); };
  return is_plain(tensor) && is_plain(other);
}

void record_stream(at::Tensor&, c10::Stream) {}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

// Raise the error of a GPU if a tensor is on the CPU; scalars and indices may be, unless they are written to.
void check_device(const c10::OperatorHandle& op, const torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  const bool indexed = starts_with(name, "aten::index") || starts_with(name, "aten::_index_put_impl");
  const bool exact = name == "aten::equal" || starts_with(name, "aten::_foreach");
  const auto& arguments = schema.arguments();
  const auto check = [&](const at::Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || tensor.device().type() == TYPE) return;
    const bool written = argument.alias_info() && argument.alias_info()->isWrite();
    if (!written && ((tensor.dim() == 0 && !exact) || (indexed && argument.name() == "indices"))) return;
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but ", argument.name(), " of ", name,
                " is on ", tensor.device(), ", and others are on ", device());
  };
  for (size_t k = 0; k < arguments.size(); ++k) {
    const auto& value = torch::jit::peek(*stack, k, arguments.size());
    if (value.isTensor()) check(value.toTensor(), arguments[k]);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) check(tensor, arguments[k]);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        if (tensor) check(*tensor, arguments[k]);
  }
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  check_device(op, stack);
  at::native::cpu_fallback(op, stack, /*error_on_views=*/true);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_has_compatible_shallow_copy_type", &may_take_data_of);
  library.impl("record_stream", &record_stream);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("resize_", &resize);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
}

}  // namespace
