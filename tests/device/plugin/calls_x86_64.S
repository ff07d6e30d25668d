// The two places where calls cross without a signature in C++ (System V ABI, x86-64). Both keep unwinding
// information, so that exceptions of kernels pass.

// void reference_device_entry(...)
// Where the thunk of a kernel jumps to, the kernel's record in r11. Lays the registers that carry arguments down
// in memory and calls reference_device_called(record, integers, vectors, stack).
.text
.globl reference_device_entry
.type reference_device_entry, @function
reference_device_entry:
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    sub $128, %rsp
    mov %rdi, 0(%rsp)
    mov %rsi, 8(%rsp)
    mov %rdx, 16(%rsp)
    mov %rcx, 24(%rsp)
    mov %r8, 32(%rsp)
    mov %r9, 40(%rsp)
    movq %xmm0, 48(%rsp)
    movq %xmm1, 56(%rsp)
    movq %xmm2, 64(%rsp)
    movq %xmm3, 72(%rsp)
    movq %xmm4, 80(%rsp)
    movq %xmm5, 88(%rsp)
    movq %xmm6, 96(%rsp)
    movq %xmm7, 104(%rsp)
    mov %r11, %rdi
    mov %rsp, %rsi
    lea 48(%rsp), %rdx
    lea 16(%rbp), %rcx
    call reference_device_called@PLT
    leave
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
.size reference_device_entry, . - reference_device_entry

// void reference_device_invoke(void* function, const uint64_t* integers, const uint64_t* vectors,
//                              const uint64_t* stack, size_t num_stack)
// Calls the function with these registers and these words on the stack.
.globl reference_device_invoke
.type reference_device_invoke, @function
reference_device_invoke:
    .cfi_startproc
    push %rbp
    .cfi_def_cfa_offset 16
    .cfi_offset %rbp, -16
    mov %rsp, %rbp
    .cfi_def_cfa_register %rbp
    push %rbx
    .cfi_offset %rbx, -24
    push %r12
    .cfi_offset %r12, -32
    mov %rdi, %rbx
    mov %rsi, %r12
    mov %rdx, %r10
    mov %r8, %rax              // an even number of words keeps the stack aligned
    inc %rax
    and $-2, %rax
    shl $3, %rax
    sub %rax, %rsp
    xor %eax, %eax
1:  cmp %r8, %rax
    jge 2f
    mov (%rcx, %rax, 8), %r11
    mov %r11, (%rsp, %rax, 8)
    inc %rax
    jmp 1b
2:  movq 0(%r10), %xmm0
    movq 8(%r10), %xmm1
    movq 16(%r10), %xmm2
    movq 24(%r10), %xmm3
    movq 32(%r10), %xmm4
    movq 40(%r10), %xmm5
    movq 48(%r10), %xmm6
    movq 56(%r10), %xmm7
    mov 0(%r12), %rdi
    mov 8(%r12), %rsi
    mov 16(%r12), %rdx
    mov 24(%r12), %rcx
    mov 32(%r12), %r8
    mov 40(%r12), %r9
    call *%rbx
    lea -16(%rbp), %rsp
    pop %r12
    pop %rbx
    pop %rbp
    .cfi_def_cfa %rsp, 8
    ret
    .cfi_endproc
.size reference_device_invoke, . - reference_device_invoke

.section .note.GNU-stack, "", @progbits
